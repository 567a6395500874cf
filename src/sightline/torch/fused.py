"""torch's own fused attention on CUDA, for problems it answers as this library would; and when it is taken.

Whether it or our own kernel is faster is decided by `RULES`. No GPU was at hand when they were written: each names the
published figures it rests on, and `sightline bench --device cuda` times both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..kernel import Kernel, Refusal, Result
from ..problem import Problem
from .autograd import needs_gradients

__all__ = ["RULES", "Fused", "Rule"]

MAX_HEAD_WIDTH = 256  # head width of FlashAttention's kernels in torch
MIN_COMPUTE_CAPABILITY = 8  # major compute capability they are built for
PREFERRED_COST, FALLBACK_COST = 0.1, 3.0  # costs: less than our own kernel's 1, or more, yet less than streaming's 10


@dataclass(frozen=True)
class Rule:
    """Who answers plain problems on devices whose name begins so."""

    architecture: str
    prefers_torch: bool  # torch's kernels do, where no gradient is wanted
    reason: str


RULES = (
    Rule(
        "sm_8",
        True,
        "FlashAttention-2 was 1.3 to 1.5 times as fast forward on an A100 as the Triton kernel of its time "
        '(Dao, "FlashAttention-2", 2023, section 4.1)',
    ),
    Rule(
        "sm_9",
        True,
        "torch takes cuDNN, published for 9.19 on an H200 at 691 TFLOP/s (d 128, n 8,192), where a large product runs "
        "at about 790",
    ),
    Rule("sm_1", True, "torch takes cuDNN or FlashAttention, built for it; of our own kernels nothing is known there"),
    Rule("gfx", False, "torch's kernels are Triton's there too (AOTriton)"),
)
GRADIENT_REASON = (
    "gradients are wanted, and the fused ones are summed in an order that changes from run to run; ours are the same "
    "bits always"
)


class Fused(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention` on CUDA: FlashAttention or cuDNN, as torch decides.

    It is taken outside the operator, so gradients and compilation are torch's. It returns no lse.

    It has a causal mask, and yet is not given one: FlashAttention sets hidden scores to −∞ and then multiplies their
    weight, 0, by the value, and 0 · NaN is NaN. What torch guarantees of hidden values is nothing, what this library
    does is that they reach nothing, and whether a value is finite cannot be known without waiting for the device.
    So answers may differ where a weight is 0 without a mask, its score being −∞, as a key of ∞ gives, or far below the
    largest of its row: NaN, where the value is not finite.

    Parameters
    ----------
    architecture : "sm_90", "gfx942", ... to decide as if on such a device
    """

    name = "fused"
    description = "torch's fused kernels on CUDA, for attention without a formula"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Whatever torch's kernels do not do, or do in n² memory."""
        device = problem.query.device
        if device.type != "cuda":
            yield Refusal(f"the arrays are on {device.type}", "move them to a CUDA device")
        elif torch.version.hip is None and torch.cuda.get_device_properties(device).major < MIN_COMPUTE_CAPABILITY:
            yield Refusal(
                "a device older than torch's fused kernels", f"use one of compute capability {MIN_COMPUTE_CAPABILITY}.0"
            )
        if problem.mask is not None or problem.score is not None:
            yield Refusal(
                "a mask or score: torch's kernels know no formulas, and let NaN that a mask hides through",
                "leave mask and score out",
            )
        if problem.sinks is not None:
            yield Refusal("sinks", "leave sinks out")
        if problem.see:
            yield Refusal("statistics of the weights", "leave see out")
        if problem.dropout:
            yield Refusal("dropout by another generator", "set dropout=0")
        if problem.query.dtype not in (torch.float16, torch.bfloat16):
            yield Refusal(f"{problem.query.dtype}", "use float16 or bfloat16")
        if problem.d_k != problem.d_v or problem.d_k > MAX_HEAD_WIDTH:
            yield Refusal(f"d_k {problem.d_k} and d_v {problem.d_v}", f"make them equal, at most {MAX_HEAD_WIDTH}")
        if any(array.stride(-1) != 1 for array in (problem.query, problem.key, problem.value)):
            yield Refusal("rows that do not lie together, for which torch would hold all weights", "call .contiguous()")
        if problem.query.numel() == 0 or problem.key.numel() == 0:
            yield Refusal("no queries or no keys", "give at least one of each")

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        """Yield nothing: torch differentiates its own kernels."""
        yield from ()

    def cost(self, problem: Problem) -> float:
        return PREFERRED_COST if self.is_preferred(problem) else FALLBACK_COST

    def is_preferred(self, problem: Problem) -> bool:
        """Whether it is taken rather than our own kernel, by the rule for the device."""
        rule = self._rule(problem)
        return rule is not None and rule.prefers_torch and not _has_nondeterministic_gradients(problem)

    def cost_reason(self, problem: Problem) -> str:
        """The rule by which it is taken or left."""
        rule = self._rule(problem)
        if rule is not None and rule.prefers_torch and _has_nondeterministic_gradients(problem):
            return GRADIENT_REASON
        return "no rule knows this device" if rule is None else f"on {rule.architecture}…, {rule.reason}"

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value))
        grouped = problem.group > 1
        if grouped and torch.version.hip is not None:  # where not all of its kernels know groups
            key, value = (x.repeat_interleave(problem.group, dim=1) for x in (key, value))
            grouped = False
        output = functional.scaled_dot_product_attention(query, key, value, scale=problem.scale, enable_gqa=grouped)
        return Result(output.reshape(*problem.batch_shape, *output.shape[-3:]), lse=None)

    def _rule(self, problem: Problem) -> Rule | None:
        name = self.architecture or _device_architecture(problem.query.device)
        return next((rule for rule in RULES if name.startswith(rule.architecture)), None)


def _has_nondeterministic_gradients(problem: Problem) -> bool:
    """Whether gradients are wanted, of inputs that torch may sum as it likes."""
    is_needed = needs_gradients(problem.query, problem.key, problem.value)
    return is_needed and not torch.are_deterministic_algorithms_enabled()


def _device_architecture(device: torch.device) -> str:
    """The device's, as `gpu.chosen.architecture_of` has it, by the one question that torch.compile follows."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return str(properties.gcnArchName) if torch.version.hip is not None else f"sm_{properties.major}{properties.minor}"
