"""Descriptions of a call that the ranks compare: calls that differ have different descriptions."""

import numpy as np
import pytest
import torch

from sightline import i, j, s, table
from sightline.torch.distributed.agreement import describe_array, describe_formula, describe_number

LONG = s
for step in range(200):
    LONG = LONG + 0.5 * (i - j - step)

FORMULAS = {
    "a number beyond the printed digits": (s * 0.123456789012, s * 0.123456789013),
    "the end of a long formula": (LONG + 1, LONG + 2),
    "entries of a table": (s + table(np.zeros(3))[j], s + table(np.ones(3))[j]),
    "the dtype of a table": (s + table(np.zeros(3))[j], s + table(np.zeros(3, np.float32))[j]),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_other_formulas_have_other_descriptions(kind):
    first, second = map(describe_formula, FORMULAS[kind])
    assert first != second


def test_other_numbers_and_dtypes_have_other_descriptions():
    assert describe_number(0.1) != describe_number(np.nextafter(0.1, 1))
    assert describe_number(torch.tensor(0.5)) == describe_number(0.5)
    assert describe_array(torch.zeros(2, dtype=torch.bfloat16)) != describe_array(torch.zeros(2))
