"""What is compiled into a CPU kernel, and the sizes that kernels and the host side of a call share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..runtime.machine import Machine

KEY_BLOCK = 64  # number of keys in a tile: its scores and its rows of K and V stay in the first two caches
SHUFFLE_BYTES = 16  # shuffles within groups of this many bytes are fast on every machine
MAX_QUERIES_PER_ITEM = 512  # of the forward kernel: so many share one copy of a tile of K and V
MAX_BYTES_PER_ITEM = 1 << 18  # of Qᵀ, Oᵀ and the like, which stay in the second-level cache

OUTPUTS_PER_ROLE = {"max_score": 2, "entropy": 1, "sum": 1, "top_k": 2}  # arrays of the roles of statistics


class ReductionRole(NamedTuple):
    """A sum, maximum or minimum that a weights pass computes; `axes`, `how` and `hidden` are those of `Reduction`.

    formula : the index of f among the kernel's formulas; 0 if f is the weight
    """

    axes: str
    how: str
    hidden: float
    formula: int

    @property
    def finds(self) -> bool:
        """True if the pass writes where the maximum or minimum is."""
        return len(self.axes) == 1 and self.hidden != 0


def count_outputs(role: str | ReductionRole) -> int:
    """Return how many output arrays a role of a statistic has; 0 for other roles."""
    return 1 + role.finds if isinstance(role, ReductionRole) else OUTPUTS_PER_ROLE.get(role, 0)


@dataclass(frozen=True)
class KernelSpec:
    """Everything that is compiled into a kernel.

    Lengths, strides, the scale, tables and the numbers of formulas are the kernel's arguments.
    """

    kernel: str
    dtype: str
    d_k: int
    d_v: int
    unit_stride: tuple[bool, ...]  # for query, key and value: True if columns are adjacent in memory
    mask: str | None  # the formulas are the structures of `formula.parameters`
    score: str | None
    tables: tuple[tuple[str, int], ...]  # dtype and number of axes of each table, by its slot in the structure
    needs_int64: bool  # True if integers of formulas have 64 bits, False if 32
    clamped: tuple[tuple[tuple[int, int], ...], ...]  # for each formula; see `Renderer`
    has_sinks: bool
    has_dropout: bool
    unroll: int = 0  # number of query rows whose products are summed together; see Decode
    vectors: int | None = None  # vectors per row of the register tile; None for all the machine has
    table_gradients: tuple[tuple[int, int, bool], ...] = ()  # lookups whose tables need gradients; see Backward
    tile_lookups: tuple[tuple[int, ...], ...] = ((), ())  # lookups t[..., i, j] of each formula; see TileTables
    extra_formulas: tuple[str, ...] = ()  # besides mask and score; they may read the final score
    k: int = 0  # number of keys listed for each query; see TopKCode
    stored: tuple[str, ...] = ()  # the dtypes of quantised K and V, of `row_formats.QUANTIZED`; () if not quantised
    roles: tuple[str | ReductionRole, ...] = ()  # of statistics; see FusedStatisticsCode, Backward, WeightStatistics

    @property
    def num_output_arrays(self) -> int:
        """Return how many output arrays follow the tables among the kernel's arguments."""
        return len(self.table_gradients) + sum(map(count_outputs, self.roles))

    @property
    def is_base_2(self) -> bool:
        """True if scores are in base 2 (times log₂ e). With a score formula or sinks, scores are in base e."""
        return self.score is None and not self.has_sinks

    @property
    def nats_per_unit(self) -> float:
        """The factor that converts scores to nats."""
        return math.log(2) if self.is_base_2 else 1.0

    @property
    def units_per_nat(self) -> float:
        """The factor that converts nats to the base of the scores, 2 or e."""
        return math.log2(math.e) if self.is_base_2 else 1.0


def max_blocks_per_item(spec: KernelSpec, query_block: int, itemsize: int) -> int:
    """Return how many blocks of queries a work item of the forward kernel may have. Qᵀ and Oᵀ of each are kept.

    `itemsize` are the bytes of a number of the accumulator's type.
    """
    queries = min(MAX_QUERIES_PER_ITEM, MAX_BYTES_PER_ITEM // ((spec.d_k + spec.d_v) * itemsize or 1))
    return max(queries // query_block, 1)


def lanes_per_vector(dtype: str, machine: Machine) -> int:
    """Return how many numbers of the dtype's accumulator type fit one vector."""
    return machine.vector_bytes // (8 if dtype == "float64" else 4)


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
