"""The options of a call as one value: every argument of `sightline.attention` besides query, key and value."""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """The options of a call. A named tuple is made quickly, and torch.compile can trace it.

    mask, score, scale, sinks, dropout, seed, kernel, threads : as in `attention`
        `score` may also be an array (..., n, m), the bias that is added to the scores.
    see : the statistics; None if the caller gave none, and receives the output alone
    by_position : True if the arrays are views of arrays with the positions before the heads
        It changes no result. Compiled programs of JAX then make no copies.
    row_formats : how the rows of key and of value are quantised; None for arrays of floats
    row_mask : a condition that hides rows of a `KVCache` besides those that the mask hides
    """

    mask: Any = None
    score: Any = None
    see: Any = None
    scale: Any = None
    sinks: Any = None
    dropout: Any = 0.0
    seed: Any = None
    kernel: Any = None
    threads: Any = None
    by_position: Any = False
    row_formats: Any = None
    row_mask: Any = None

    def replace(self, **changes: Any) -> Options:
        """Return the options with these changes. torch.compile of torch 2.6 cannot trace `_replace`."""
        return Options(*map(changes.get, FIELDS, self))

    def with_formulas(self, mask: Any, score: Any, see: Any) -> Options:
        """Return the options with this mask, score and statistics, in less time than `replace` takes."""
        return Options(mask, score, see, *self[3:])


FIELDS = Options._fields
