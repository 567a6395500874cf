"""`Explanation`, the result of `sightline.explain`: the kernel and the cost of a call, which `str` shows as a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..arrays.operations import itemsize
from ..formula.tile_ranges import find_tile_ranges
from .kernel import Plan
from .problem import Problem

COUNTED_TILE = (64, 64)  # queries and keys, on every machine; a kernel's tile may be another, such as 16 × 64
SHARED = "stored and read once for several sequences; the figures below count a copy for each sequence"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernel of an attention call, the reasons for the choice of that kernel, and the cost of the call.

    `bytes_read_and_written`, `memory` and `dense_memory` are in bytes; tables and dense masks count. `flops` and
    `dense_flops` count a multiplication and an addition as two operations. `dense_` means that all weights are stored.
    """

    shape: str
    formulas: tuple[str, ...]
    kernel: str
    description: str
    refusals: dict[str, tuple[str, ...]]  # for every kernel, the reasons why it cannot serve the problem
    reasons: dict[str, str]  # for every kernel that can serve the problem and explains its cost, the explanation
    backward_refusals: tuple[str, ...]  # why streaming computes the gradients; () if no input requires a gradient
    forced: bool  # True if the caller named the kernel
    statistics: dict[str, str]  # for every requested statistic, how it is computed
    tiles: dict[str, int]  # the numbers of empty, full and partial tiles; {} for a kernel that gathers keys
    flops: int
    dense_flops: int
    bytes_read_and_written: int
    memory: int
    dense_memory: int
    sources: dict[str, str]
    shared_keys: int = 0  # the largest number of keys that a sequence of a forked cache shares with others

    @classmethod
    def of(cls, problem: Problem, plan: Plan, source: bool = False, device: str = "") -> Explanation:
        """Return the explanation of a plan, with the generated code if `source` is true.

        `device` is the name of the device that has the arrays; by default the device of the problem.
        """
        B, H, n, m = problem.extent
        pairs = plan.kernel.pairs(problem)
        tiles = find_tile_ranges(problem.mask, problem.extent, *COUNTED_TILE).tiles if pairs is None else {}
        share = (tiles["full"] + tiles["partial"]) / max(sum(tiles.values()), 1) if tiles else 0.0
        dense = 2 * B * H * n * m * (problem.d_k + problem.d_v)
        stored, width = "", itemsize(problem.dtype)
        width_of_keys: int = (problem.d_k + problem.d_v) * width
        if problem.row_formats is not None:
            stored = ", keys in {}, values in {}".format(*[row_format.dtype for row_format in problem.row_formats])
            width_of_keys = sum(row_format.row_bytes for row_format in problem.row_formats)
        rows = B * (H * n * (problem.d_k + problem.d_v) * width + problem.G * m * width_of_keys)
        rows += sum(int(table.array.nbytes) for table in problem.tables)
        seen = sum(math.prod(shape) * itemsize(dtype) for s in problem.see for shape, dtype in s.outputs(problem))
        return cls(
            shape=f"{B} × {H} heads on {problem.G}, {n:,} queries on {m:,} keys, d_k {problem.d_k}, d_v {problem.d_v}, "
            f"{problem.dtype} on {device or problem.device}{stored}",
            formulas=_formula_lines(problem),
            kernel=plan.kernel.name,
            description=plan.kernel.description,
            refusals={name: tuple(map(str, reasons)) for name, reasons in plan.refusals.items()},
            reasons={
                kernel.name: reason
                for kernel in plan.kernels
                if not plan.refusals[kernel.name] and (reason := kernel.cost_reason(problem))
            },
            backward_refusals=tuple(map(str, plan.backward_refusals)),
            forced=plan.forced,
            statistics={repr(one): plan.kernel.describe_statistic(problem, one) for one in problem.see},
            tiles=tiles,
            flops=round(dense * share) if pairs is None else 2 * pairs * (problem.d_k + problem.d_v),
            dense_flops=dense,
            bytes_read_and_written=rows + seen,
            memory=rows + B * H * n * itemsize(problem.accumulator) + seen,
            dense_memory=rows + 2 * B * H * n * m * width + seen,
            sources=plan.kernel.sources(problem) if source else {},
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        total = max(sum(self.tiles.values()), 1)
        candidates = [name for name, reasons in self.refusals.items() if not reasons]
        share = ", ".join(f"{count:,} {kind} ({count / total:.1%})" for kind, count in self.tiles.items())
        flops, dense_flops = (format_amount(count, 1000, "") for count in (self.flops, self.dense_flops))
        sizes = self.bytes_read_and_written, self.memory, self.dense_memory
        size, memory, dense_memory = (format_amount(count, 1024, "B") for count in sizes)
        lines = [
            ("problem", self.shape),
            *(("", formula) for formula in self.formulas),
            ("kernel", f"{self.kernel}: {self.description}" + (" (asked for by name)" if self.forced else "")),
            *([("", f"chosen from {', '.join(candidates)} by its cost")] if candidates[1:] and not self.forced else []),
            *([] if self.forced else [("", f"{name}: {reason}") for name, reason in self.reasons.items()]),
            *((f"not {name}", "; ".join(reasons)) for name, reasons in self.refusals.items() if reasons),
            *([("gradients", f"by streaming: {'; '.join(self.backward_refusals)}")] if self.backward_refusals else []),
            *(("statistic", f"{statistic}: {how}") for statistic, how in self.statistics.items()),
            *([("shared", f"up to {self.shared_keys:,} keys: {SHARED}")] if self.shared_keys else []),
            *([("tiles", f"{share}, each {COUNTED_TILE[0]} × {COUNTED_TILE[1]}")] if self.tiles else []),
            ("FLOPs", f"{flops} of the dense form's {dense_flops}"),
            ("bytes", f"{size} read and written at least"),
            ("memory", f"{memory}; the dense form {dense_memory}"),
        ]
        page = [f"{name:<14}{text}" for name, text in lines]
        return "\n".join([*page, *(f"\n{name}\n\n{text}" for name, text in self.sources.items())])


def _formula_lines(problem: Problem) -> tuple[str, ...]:
    lines = [f"scale {problem.scale:.6g}"]
    if problem.score is not None:
        lines.append(f"score {problem.score}")
    if problem.mask is not None:
        lines.append(f"mask  {problem.mask}")
    lines += [f"{entry} is t in its formula" for entry in problem.tables[:1] if len(problem.tables) == 1]
    if problem.sinks is not None:
        lines.append("sinks, one per head")
    if problem.dropout:
        lines.append(f"dropout {problem.dropout}, seed {problem.seed}")
    return tuple(lines)


def format_amount(amount: float, step: int, unit: str) -> str:
    """Return three digits of an amount, with the prefix of its unit. `step` is 1000, or 1024 for bytes."""
    prefixes = ["", "k", "M", "G", "T", "P"] if step == 1000 else ["", "Ki", "Mi", "Gi", "Ti", "Pi"]
    power = 0
    while round(amount, 1) >= 999.5 and power < len(prefixes) - 1:
        amount, power = amount / step, power + 1
    return f"{amount:.3g} {prefixes[power]}{unit}".rstrip()
