"""Settings of all tests: equal random draws in every run, and soak tests only with `-m soak`."""

import gc
import os

import numpy.ma  # noqa: F401 - its first import fails in a test that has changed NumPy's functions
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
)  # a failed assertion in these modules shows its values, as in a test

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
torch.set_num_threads(1)  # tests run in parallel processes


def pytest_configure(config):
    if "soak" in config.getoption("markexpr"):
        settings.load_profile("soak")


def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `soak` unless -m names that marker."""
    if "soak" not in config.getoption("markexpr"):
        deselected = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish():
    """Exclude the 600,000 objects that imports created from garbage collection, which saves 0.4 s per collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries check for leftover objects at exit


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Compile kernels again and cache none of them: for tests that change the code generator."""
    from sightline.cpu.runtime import compile

    monkeypatch.setattr(compile, "_cache", compile.KernelCache())
    monkeypatch.setenv("SIGHTLINE_CACHE", "off")


@pytest.fixture
def rng():
    """A random generator with a fixed seed."""
    import numpy as np

    return np.random.default_rng(20170612)


@pytest.fixture
def by_definition(monkeypatch):
    """Register attention by its definition in transformers, under the name "definition"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from tiny_models import definition

    def mask(*arguments, **options):
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "definition", definition)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "definition", mask)
