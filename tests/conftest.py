"""Settings of all tests: equal random draws in every run, soak and wide tests only with `-m soak` and `-m wide`."""

import gc
import os
from collections import Counter, OrderedDict
from importlib.util import find_spec

import numpy.ma  # its first import fails in a test that has changed NumPy's functions
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from default_device import default_device  # noqa: F401 - a fixture of every test

pytest.register_assert_rewrite(
    "elementary_functions",
    "fake_cuda",
    "gradient_checks",
    "sample_problems",
    "statistic_definitions",
    "weights_pass_checks",
)  # a failed assertion in these modules shows its values, as in a test

collect_ignore = ["helpers"]
if find_spec("transformers") is None:
    collect_ignore += ["transformers"]
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore += ["gpu/interpreted"]

UNFREEZE = gc.unfreeze

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


def mark_samples(items):
    """Mark the cases of sampled tests as `wide`, but for the first of each marker and then one in so many.

    A number without a divisor in common with the lengths of a product leaves cases that have every value of each
    parameter.
    """
    counts = Counter()
    for item in items:
        node, sampled = next(item.iter_markers_with_node("sampled"), (None, None))
        if sampled and not item.get_closest_marker("soak"):
            marked = node.nodeid.partition("[")[0]
            if counts[marked] % sampled.kwargs["one_in"]:
                item.add_marker("wide")
            counts[marked] += 1


def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `soak`, and wide ones, unless -m names that marker or the command names the test."""
    mark_samples(items)
    chosen, named = config.getoption("markexpr"), any("::" in argument for argument in config.args)
    kept, deselected = [], []
    for item in items:
        marker = next(filter(item.get_closest_marker, ("soak", "wide")), "")
        is_kept = marker in chosen or (marker == "wide" and named)
        (kept if is_kept else deselected).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish():
    """Exclude the 600,000 objects that imports created from garbage collection, which saves 0.4 s per collection.

    A test that runs the bench must not include them again: `interleave` freezes and unfreezes all objects.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_runtest_teardown():
    """Take back the number of threads that a benchmark sets: kernels and torch use it too."""
    torch.set_num_threads(1)


def pytest_unconfigure():
    gc.unfreeze = UNFREEZE
    gc.unfreeze()  # libraries check for leftover objects at exit


@pytest.fixture
def fresh_calls(monkeypatch):
    """Start with an empty call cache, and leave no call in it: for tests that change which kernels there are."""
    from sightline.call import call_cache

    monkeypatch.setattr(call_cache, "calls", OrderedDict())
    monkeypatch.setattr(call_cache, "families", OrderedDict())


@pytest.fixture
def fresh_kernels(monkeypatch, fresh_calls):
    """Compile kernels again and cache none of them: for tests that change the code generator."""
    from sightline.cpu.runtime import compile

    monkeypatch.setattr(compile, "_cache", compile.KernelCache())
    monkeypatch.setenv("SIGHTLINE_CACHE", "off")


@pytest.fixture
def rng():
    """A random generator with a fixed seed."""
    return numpy.random.default_rng(20170612)


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
