"""The choice of a kernel: reasons, cures, and what `explain` says of them."""

import numpy as np
import pytest

import sightline
from sightline import i, j
from sightline.attention import KERNELS
from sightline.errors import KernelRefusedError, ParameterError
from sightline.plan import Kernel, Refusal, choose
from sightline.problem import pose


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def question(dtype=np.float32, **options):
    x = zeros(1, 2, 8, 4, dtype=dtype)
    return pose(x, x, x, **options)


class Picky(Kernel):
    """Refuses for two reasons, and would be the cheapest."""

    name, describes = "picky", "says no"

    def refuses(self, problem):
        yield Refusal("too small", "make it larger")
        yield Refusal("too plain", "add a mask")

    def cost(self, problem):
        return 0.0

    def run(self, problem, threads=None):
        raise AssertionError("a kernel that refuses is not run")


def test_the_cheapest_kernel_that_can_is_taken():
    assert choose(KERNELS, question()).kernel.name == "cpu"
    assert choose(KERNELS, question(dtype=np.float16)).kernel.name == "streaming"
    assert choose((Picky(), *KERNELS), question()).kernel.name == "cpu"


def test_a_forced_kernel_raises_every_reason_with_its_cure():
    with pytest.raises(KernelRefusedError) as caught:
        choose((Picky(), *KERNELS), question(), "picky")
    for words in ("too small", "too plain", "make it larger", "add a mask"):
        assert words in str(caught.value)


def test_an_unknown_kernel_is_an_error_that_names_the_known_ones():
    with pytest.raises(ParameterError, match="'cpu', 'streaming', 'reference'"):
        choose(KERNELS, question(), "gpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_serves_a_plain_problem(kernel):
    assert not list(kernel.refuses(question()))


def test_explain_counts_tiles_and_work():
    x = zeros(2, 4, 1024, 32)
    found = sightline.explain(x, x, x, mask=i >= j)
    assert found.kernel == "cpu"
    assert found.tiles == {"empty": 8 * 120, "full": 8 * 120, "partial": 8 * 16}
    assert found.dense_flops == 2 * 8 * 1024 * 1024 * 64
    assert found.flops == found.dense_flops * 136 // 256
    assert found.dense_memory > found.memory
    assert "i ≥ j" in str(found)


def test_explain_says_why_others_refused():
    x = zeros(1, 1, 8, 4, dtype=np.float16)
    assert "dtype float16 (cast to float32 or float64)" in str(sightline.explain(x, x, x))


def test_explain_of_nothing():
    x = zeros(0, 1, 0, 4)
    assert sum(sightline.explain(x, x, x).tiles.values()) == 0
