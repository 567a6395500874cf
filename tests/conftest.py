"""Settings of every test: the same draws on every run, and long runs only when asked for."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

pytest.register_assert_rewrite(
    "elementary_functions",
    "fake_cuda",
    "gradient_checks",
    "sample_problems",
    "statistic_definitions",
    "weights_pass_checks",
)  # a failed assertion there tells its values, as one of a test does

collect_ignore = ["helpers"]
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore += ["gpu/interpreted"]

settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.register_profile("soak", settings.get_profile("suite"), derandomize=False, max_examples=20_000)
settings.load_profile("suite")
torch.set_num_threads(1)  # tests run side by side


def pytest_configure(config):
    if "soak" in config.getoption("markexpr"):
        settings.load_profile("soak")


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `soak` unless -m names it."""
    if "soak" not in config.getoption("markexpr"):
        long = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


def pytest_collection_finish():
    """What imports left stays to the end, so no collection looks through it again: 600,000 objects, 0.4 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries look at the end whether something of theirs is left


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Kernels are compiled anew and kept nowhere: for tests that change how they are written."""
    from sightline.cpu.runtime import compile

    monkeypatch.setattr(compile, "_cache", compile.KernelCache())
    monkeypatch.setenv("SIGHTLINE_CACHE", "off")


@pytest.fixture
def rng():
    """Random numbers, the same on every run."""
    import numpy as np

    return np.random.default_rng(20170612)


@pytest.fixture
def by_definition(monkeypatch):
    """Attention as the papers write it, under a name that models of transformers take."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from tiny_models import definition

    def mask(*arguments, **options):
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "definition", definition)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "definition", mask)
