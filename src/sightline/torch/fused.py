"""torch's fused attention kernels on CUDA, and the rules for choosing them over the Triton kernels.

The kernel `Fused` serves problems without formulas. `RULES` says on which GPUs torch's kernels are preferred to the
Triton kernels, each with its reason: a measurement or a published figure. `python -m benchmarks --device cuda` times
torch's kernels and the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention  # bound before `replacing` replaces it

from ..call import call_cache
from ..call.call_cache import Operands, store_call
from ..call.kernel import Kernel, Refusal, Result
from ..call.problem import Problem
from ..call.request import Request
from ..gpu.configurations import architecture_of
from .autograd import needs_gradients

MAX_HEAD_WIDTH = 256  # largest head width of torch's FlashAttention kernels
NUM_AXES = 4  # of query, key and value, as torch's own kernels take them
MIN_COMPUTE_CAPABILITY = 8  # smallest major compute capability of torch's FlashAttention kernels
PREFERRED_COST, FALLBACK_COST = 0.1, 3.0  # relative costs; the Triton kernels have 1, streaming has 10


RULES = {  # by the beginning of the architecture's name: why torch's kernels are preferred, on AMD's GPUs why not
    "sm_8": "FlashAttention-2 was 1.3 to 1.5 times as fast forward on an A100 as the Triton kernel of its time "
    '(Dao, "FlashAttention-2", 2023, section 4.1)',
    "sm_9": "torch uses cuDNN; cuDNN 9.19 computed 636 TFLOP/s on an H200, and the Triton kernels 466 (d 128, n 8,192)",
    "sm_1": "torch uses cuDNN or FlashAttention kernels built for this GPU; the Triton kernels were never measured on "
    "one",
    "gfx": "torch's kernels for AMD are written in Triton too (AOTriton)",
}
GRADIENT_REASON = (
    "gradients are needed, and torch's kernels sum gradients in an order that changes from run to run; the Triton "
    "kernels always give the same bits"
)


class Fused(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention` on CUDA: FlashAttention or cuDNN, as torch decides.

    The kernel runs outside the operator of this library, so torch computes gradients and compiles the call. The result
    has no lse.

    torch's kernels support a causal mask, but `Fused` refuses every mask. FlashAttention multiplies the weight 0 of a
    hidden value by the value, and 0 · NaN is NaN. This library guarantees that a hidden value never reaches the output,
    and checking whether values are finite would wait for the device. Without a mask a weight can be 0 too, if its score
    is far below the row's maximum, or −∞ (for example by an ∞ in K). If its value is not finite, `Fused` returns NaN.

    architecture : "sm_90", "gfx942", ...; the rule of this architecture is applied in place of the device's
    """

    name, device = "fused", "cuda"
    description = "torch's fused kernels on CUDA, for attention without a formula"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield a refusal for tensors that are not on a GPU, or for every feature that torch's kernels lack."""
        device = problem.query.device
        if device.type != self.device:
            yield Refusal("torch's fused kernels: on a GPU only", "tensors on cuda")
            return
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        if is_nvidia and torch.cuda.get_device_properties(device).major < MIN_COMPUTE_CAPABILITY:
            yield Refusal(f"a GPU older than compute capability {MIN_COMPUTE_CAPABILITY}.0", "use a later GPU")
        if problem.mask is not None or problem.score is not None:
            yield Refusal(
                "a mask or score: torch's kernels support no formulas, and let hidden NaN reach the output",
                "leave mask and score out",
            )
        if problem.sinks is not None:
            yield Refusal("sinks", "leave sinks out")
        if problem.see:
            yield Refusal("statistics of the weights", "leave see out")
        if problem.dropout:
            yield Refusal("dropout, for which torch uses another generator", "set dropout=0")
        if problem.query.dtype not in (torch.float16, torch.bfloat16):
            yield Refusal(f"{problem.query.dtype}", "use float16 or bfloat16")
        if problem.d_k != problem.d_v or problem.d_k > MAX_HEAD_WIDTH:
            yield Refusal(f"d_k {problem.d_k} and d_v {problem.d_v}", f"make them equal, at most {MAX_HEAD_WIDTH}")
        if any(array.stride(-1) != 1 for array in (problem.query, problem.key, problem.value)):
            yield Refusal("rows with a stride other than 1, for which torch stores all weights", "call .contiguous()")
        if problem.query.numel() == 0 or problem.key.numel() == 0:
            yield Refusal("no queries or no keys", "pass at least one query and one key")

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        """Yield nothing: torch differentiates its own kernels."""
        yield from ()

    def cost(self, problem: Problem) -> float:
        return PREFERRED_COST if self.is_preferred(problem) else FALLBACK_COST

    def is_preferred(self, problem: Problem) -> bool:
        return self._decide(problem)[0]

    def cost_reason(self, problem: Problem) -> str:
        return self._decide(problem)[1]

    def run(self, problem: Problem) -> Result:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value))
        grouped = problem.group > 1
        if grouped and torch.version.hip is not None:  # some of torch's kernels for AMD support no groups
            key, value = (x.repeat_interleave(problem.group, dim=1) for x in (key, value))
            grouped = False
        output = scaled_dot_product_attention(query, key, value, scale=problem.scale, enable_gqa=grouped)
        return Result(output.reshape(*problem.batch_shape, *output.shape[-3:]), lse=None)

    def _decide(self, problem: Problem) -> tuple[bool, str]:
        """Return (True if the rule prefers torch's kernels and no gradient would be nondeterministic, the reason)."""
        name = self.architecture or architecture_of(problem.query.device)
        rule = next((rule for rule in RULES if name.startswith(rule)), None)
        if rule is None:
            return False, "no rule covers this device"
        if rule != "gfx" and needs_gradients(problem) and not torch.are_deterministic_algorithms_enabled():
            return False, GRADIENT_REASON
        return rule != "gfx", f"on {rule}…, {RULES[rule]}"


class FusedEntry:
    """A cached call that torch's own kernels serve."""

    prepared = None  # no generated code can run it; see `cpu.calls.direct_call`

    def __init__(self, problem: Problem) -> None:
        self.scale, self.is_grouped = problem.scale, problem.group > 1

    def run(self, request: Request, operands: Operands, results: Any) -> Any:
        """Return (output, seen) of the call."""
        return scaled_dot_product_attention(*operands, scale=self.scale, enable_gqa=self.is_grouped), ()


def store_fused(request: Request, operands: Operands, problem: Problem) -> None:
    """Store a call that torch's own kernels served, if it needs no gradients and the arrays were passed unchanged."""
    read = problem.query, problem.key, problem.value
    # on AMD GPUs `Fused.run` changes key and value
    is_unchanged = all(x is y for x, y in zip(read, operands, strict=True)) and problem.query.ndim == NUM_AXES
    if is_unchanged and not needs_gradients(problem) and torch.version.hip is None:
        store_call(call_cache.calls, request.key, FusedEntry(problem))
