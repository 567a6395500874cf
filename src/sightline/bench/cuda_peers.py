"""The peers on a GPU: torch's fused kernels one by one, FlexAttention compiled, and the dense way."""

from __future__ import annotations

from typing import Any

from .benchmarks import CAUSAL
from .dense_statistics import Dense
from .implementations import Implementation, PreparedCall, prepare_with_autograd
from .peers import Flex
from .workloads import Inputs, Workload

__all__ = ["Backend", "FlexOnDevice", "make_peers"]

BACKENDS = {  # by name: what it is called, and torch's word for it
    "flash": ("torch, flash", "FLASH_ATTENTION"),
    "cudnn": ("torch, cuDNN", "CUDNN_ATTENTION"),
    "efficient": ("torch, memory-efficient", "EFFICIENT_ATTENTION"),
}


class Backend(Implementation):
    """torch.nn.functional.scaled_dot_product_attention held to one of its fused kernels."""

    packages, pip = ("torch",), "torch"

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.label, self.backend = BACKENDS[name]

    def refuses(self, workload: Workload) -> str | None:
        """Formulas, but for the causal mask."""
        if (
            workload.score
            or workload.bias
            or workload.dropout
            or not (workload.mask is None or workload.mask is CAUSAL)
        ):
            return "no formulas"
        return "no statistics" if workload.see else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        options: dict[str, Any] = {"is_causal": workload.mask is CAUSAL, "enable_gqa": workload.G != workload.H}

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)


class FlexOnDevice(Flex):
    """torch's FlexAttention, compiled: the block mask is made beforehand and not timed."""

    note = "compiled, and its block mask made, outside the timing"

    def __init__(self, device: str) -> None:
        self.device = device

    def refuses(self, workload: Workload) -> str | None:
        """Dropout, a bias with a gradient, statistics."""
        if workload.dropout or workload.bias:
            return "no dropout" if workload.dropout else "no bias with a gradient"
        return "no statistics" if workload.see else None


def make_peers(device: str) -> dict[str, Implementation]:
    """The peers with their tensors there."""
    peers = (*(Backend(name, device) for name in BACKENDS), FlexOnDevice(device), Dense(device))
    return {peer.name: peer for peer in peers}
