"""The error for a formula that Python uses as one True or False, with a cure for the place where Python does so."""

from __future__ import annotations

import dis
import sys

from ..errors import FormulaError


def truth_value_error(formula: str, depth: int = 2) -> FormulaError:
    """Return the error. `depth` is the number of frames between this function and the code that uses the formula."""
    frame = sys._getframe(depth)
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    place = "by `and`, `or`, `not`, `if` or a chained comparison"
    cure = (
        "write (a < i) & (i < b) for a < i < b and for a < i & i < b, & for and, | for or, ~ for not, "
        "sightline.where(...) for if"
    )
    if "CALL" in operation:
        place = "by a function of Python, such as max, min, any, all or sorted"
        cure = (
            "write numpy.maximum(i, j) or torch.maximum(i, j) for max(i, j), minimum for min, x | y for any([x, y]), "
            "x & y for all([x, y])"
        )
    elif operation == "CONTAINS_OP":
        place = "by `in`"
        cure = "write (i == 1) | (i == 5), or torch.isin(i, torch.tensor([1, 5])), for i in [1, 5]"
    return FormulaError(
        f"a formula ({formula}) was used as one True or False, {place}",
        "conditions over all (i, j) at once, joined by & | ~",
        cure,
    )
