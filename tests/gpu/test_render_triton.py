"""Formulas as text of Triton functions. `python tests/gpu/test_render_triton.py` rewrites the golden files."""

from pathlib import Path

import numpy as np
import pytest

from sightline import alibi, causal, documents, h, i, j, m, n, padding, relative_bias, s, softcap, table, where, window
from sightline.call.problem import make_problem
from sightline.formula.operators import OPERATORS
from sightline.gpu import Triton
from sightline.gpu.codegen.render_triton import TRITON_RULES

GOLDEN = Path(__file__).parent / "golden"
FORMULAS = {
    "causal": {"mask": causal("lower right")},
    "window": {"mask": window(256)},
    "documents": {"mask": documents(lengths=[3, 5]) & causal()},
    "padding": {"mask": padding([8, 5])},
    "alibi": {"score": alibi(2)},
    "softcap": {"score": softcap(30.0)},
    "relative": {"score": relative_bias(np.zeros((2, 9)))},
    "whole_numbers": {"mask": (i // 3 - j % 4 > where(h == 0, 1, -2)) ^ ~(abs(i - j) < 3)},
    "reals": {"mask": np.sqrt(i * 0.1) + 0.37 * j < np.minimum(n / 2, m**0.5)},
    "beyond_32_bits": {"mask": i * 2**40 > j},
    "one_number": {"score": 3},
    "everywhere_in_its_table": {"score": s + table(np.zeros(8))[np.clip(i - j, 0, 7)]},
    "outside_where_hidden": {"mask": i >= j, "score": s + table(np.zeros(8))[i - j]},
}


def rendered(name):
    x = np.zeros((2, 2, 8, 4), np.float32)
    sources = Triton().sources(make_problem(x, x, x, **FORMULAS[name]))
    return "\n\n".join(sources.values())


@pytest.mark.parametrize("name", FORMULAS)
def test_sources_are_the_reviewed_golden_files(name):
    assert rendered(name) == (GOLDEN / f"{name}.txt").read_text()


def test_every_golden_file_is_compared():
    assert {file.stem for file in GOLDEN.iterdir()} == set(FORMULAS)


def test_every_operator_has_a_rule():
    assert set(TRITON_RULES) == set(OPERATORS)


def test_floor_division_rounds_the_quotient_once():
    """Triton's own float32 division may fall short of an integer quotient, for example of 6 / 3 = 2."""
    x = np.zeros((1, 1, 8, 4), np.float32)
    sources = Triton().sources(make_problem(x, x, x, score=s // 3.0 + s % 0.1))
    assert "tl.floor(real_quotient(s, 3.0)) + real_remainder(s, 0.1)" in sources["score_at"]
    assert "import real_quotient, real_remainder\n" in sources["score_at"]


def test_rendering_loads_neither_triton_nor_torch():
    import subprocess
    import sys

    code = """
import sys, numpy as np, sightline
from sightline.gpu import Triton
from sightline.call.problem import make_problem
x = np.zeros((1, 1, 4, 4))
assert "tl.load" in Triton().sources(make_problem(x, x, x, score=sightline.alibi(1)))["score_at"]
assert not {"triton", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    for name in FORMULAS:
        (GOLDEN / f"{name}.txt").write_text(rendered(name))
