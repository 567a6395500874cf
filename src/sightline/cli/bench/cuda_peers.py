"""The peers on a GPU: each of torch's fused attention kernels, compiled FlexAttention, and the dense computation."""

from __future__ import annotations

from typing import Any

from .dense_statistics import Dense
from .implementations import Implementation, PreparedCall, prepare_with_autograd
from .peers import Flex
from .workloads import Inputs, Workload

BACKENDS = {  # by the peer's name: (its label, torch's name of the backend)
    "flash": ("torch, flash", "FLASH_ATTENTION"),
    "cudnn": ("torch, cuDNN", "CUDNN_ATTENTION"),
    "efficient": ("torch, memory-efficient", "EFFICIENT_ATTENTION"),
}


class Backend(Implementation):
    """torch.nn.functional.scaled_dot_product_attention, restricted to one of its fused kernels."""

    packages, pip = ("torch",), "torch"

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.label, self.backend = BACKENDS[name]

    def refuses(self, workload: Workload) -> str | None:
        """Refuse formulas other than the causal mask, biases, dropout and statistics."""
        if workload.score or workload.bias or workload.dropout or workload.needs_mask_array:
            return "no formulas"
        return "no statistics" if workload.see else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        options: dict[str, Any] = {"is_causal": workload.is_causal, "enable_gqa": workload.G != workload.H}

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)


class FlexOnDevice(Flex):
    """torch's FlexAttention, compiled. The compilation and the making of its block mask are not timed."""

    note = "compiling it and making its block mask are not timed"

    def __init__(self, device: str) -> None:
        self.device = device

    def refuses(self, workload: Workload) -> str | None:
        """Refuse dropout, biases and statistics. A bias is refused because its gradient is a result of the workload."""
        if workload.dropout or workload.bias:
            return "no dropout" if workload.dropout else "no bias with a gradient"
        return "no statistics" if workload.see else None


def make_peers(device: str) -> dict[str, Implementation]:
    """Return the GPU's peers by name. Each peer keeps its tensors on `device`, torch's name of a device."""
    peers = (*(Backend(name, device) for name in BACKENDS), FlexOnDevice(device), Dense(device))
    return {peer.name: peer for peer in peers}
