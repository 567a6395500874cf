"""torch's own fused attention on CUDA, for problems it answers as this library would."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ..plan import Kernel, Refusal, Result
from ..problem import Problem

__all__ = ["Fused"]

WIDEST = 256  # head width of FlashAttention's kernels in torch


class Fused(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention` on CUDA: FlashAttention or cuDNN, as torch decides.

    It is taken outside the operator, so gradients and compilation are torch's. It returns no lse.
    """

    name = "fused"
    describes = "torch's fused kernels on CUDA, for attention without a formula"

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Whatever torch's kernels do not do, or do in n² memory."""
        device = problem.query.device.type
        if device != "cuda":
            yield Refusal(f"the arrays are on {device}", "move them to a CUDA device")
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
        if problem.d_k != problem.d_v or problem.d_k > WIDEST:
            yield Refusal(f"d_k {problem.d_k} and d_v {problem.d_v}", f"make them equal, at most {WIDEST}")
        if problem.query.numel() == 0 or problem.key.numel() == 0:
            yield Refusal("no queries or no keys", "give at least one of each")

    def cost(self, problem: Problem) -> float:
        return 0.1

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        lead, group = problem.lead, problem.group
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value))
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        output = functional.scaled_dot_product_attention(query, key, value, scale=problem.scale)
        return Result(output.reshape(*lead, *output.shape[-3:]), lse=None)
