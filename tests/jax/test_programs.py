"""Compiled programs of JAX as a whole: JAX's compilation cache on disk, and their memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.wide

CACHED = """
import sys
import jax, numpy as np
from sightline import i, j, s, table
from sightline.jax import dot_product_attention
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
x = np.random.default_rng(0).normal(size=(3, 2, 70, 4, 16)).astype(np.float32)

@jax.jit
def differentiate(slope, query, key, value):
    def loss(slope, *x):
        return (dot_product_attention(*x, mask=i >= j, bias=-table(slope[None])[0] * (i - j)) ** 2).sum()
    return jax.value_and_grad(loss, range(4))(slope, query, key, value)

found = jax.tree.leaves(differentiate(np.float32(0.3), *x))
np.savez(sys.argv[2], *found)
print(events.count("cache_hits"), events.count("cache_misses"))
"""


def test_a_second_process_gets_the_program_from_the_cache_and_gives_the_same_bits(tmp_path):
    answers, counts = [], []
    for number in range(2):
        command = [sys.executable, "-c", CACHED, str(tmp_path / "cache"), str(tmp_path / f"{number}.npz")]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        counts.append([int(word) for word in result.stdout.split()])
        with np.load(tmp_path / f"{number}.npz") as file:
            answers.append([file[name] for name in file.files])
    (hits, misses), (later_hits, later_misses) = counts
    assert (hits, later_misses) == (0, 0)
    assert later_hits == misses > 0
    assert len(answers[0]) == 5
    assert all(np.array_equal(x, y) for x, y in zip(*answers, strict=True))


ROOT = Path(__file__).parents[2]  # where Python finds benchmarks
LIMIT = 64 * 2**20  # with one head of width 8, the backward kernel's 16 partial sums of dQ take half of it
MEMORY = """
import jax, jax.numpy as jnp, numpy as np, sightline
from benchmarks.peak_memory import peak_memory
from sightline import i, j
from sightline.jax import dot_product_attention

n, d, function, mask = {n}, 8, {function}, {mask}
@jax.jit
def differentiate(query, key, value, d_output):
    output, backward = jax.vjp(lambda *x: function(*x, mask=mask), query, key, value)
    return output, *backward(d_output)

rng = np.random.default_rng(0)
arrays = [jnp.asarray(rng.standard_normal({shape}, np.float32)) for _ in range(4)]
compiled = differentiate.lower(*arrays).compile()
jax.block_until_ready(differentiate(*(x[:, :99] for x in arrays)))  # libraries, and the kernels' code
peak = peak_memory(lambda arrays: jax.block_until_ready(compiled(*arrays)), lambda: arrays)
print(peak - sum(x.nbytes for x in arrays))  # the results have the shapes of the inputs
"""


def extra_bytes(n=65_536, **what):
    """Return the peak bytes of a forward and a backward pass beyond inputs and results."""
    command = [sys.executable, "-c", MEMORY.format(n=n, **what)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=600).stdout)


FUNCTIONS = {
    "by head": {"function": "sightline.attention", "shape": "(1, n, d)"},
    "by position": {"function": "dot_product_attention", "shape": "(1, n, 1, d)"},
}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
ALL_TILES = [pytest.param(name, mask, marks=pytest.mark.soak) for name in FUNCTIONS for mask in ("None", "i >= j")]


@linux
@pytest.mark.parametrize(("name", "mask"), [("by position", "(i >= j) & (i - j < 256)"), *ALL_TILES])
def test_peak_memory(name, mask):
    assert extra_bytes(**FUNCTIONS[name], mask=mask) < LIMIT


@linux
def test_the_function_of_jax_exceeds_the_limit():
    """The measurement finds n² memory: JAX's function exceeds the limit at a sixteenth of the length."""
    assert extra_bytes(4_096, function="jax.nn.dot_product_attention", shape="(1, n, 1, d)", mask="None") > LIMIT
