"""The peers on a GPU: torch's fused kernels one by one, FlexAttention compiled, and the dense way."""

from __future__ import annotations

from typing import Any

from .contenders import Contender, Ready, through_autograd
from .dense import Dense
from .peers import Flex
from .problems import CAUSAL
from .races import Inputs, Race

__all__ = ["Backend", "FlexOnDevice", "peers_on"]

BACKENDS = {  # by name: what it is called, and torch's word for it
    "flash": ("torch, flash", "FLASH_ATTENTION"),
    "cudnn": ("torch, cuDNN", "CUDNN_ATTENTION"),
    "efficient": ("torch, memory-efficient", "EFFICIENT_ATTENTION"),
}


class Backend(Contender):
    """torch.nn.functional.scaled_dot_product_attention held to one of its fused kernels."""

    packages, pip = ("torch",), "torch"

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.label, self.backend = BACKENDS[name]

    def refuses(self, race: Race) -> str | None:
        """Formulas, but for the causal mask."""
        if race.score or race.bias or race.dropout or not (race.mask is None or race.mask is CAUSAL):
            return "no formulas"
        return "no statistics" if race.see else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        options: dict[str, Any] = {"is_causal": race.mask is CAUSAL, "enable_gqa": race.G != race.H}

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

        return through_autograd(race, inputs, forward, threads, self.device)


class FlexOnDevice(Flex):
    """torch's FlexAttention, compiled: the block mask is made beforehand and not timed."""

    note = "compiled, and its block mask made, outside the timing"

    def __init__(self, device: str) -> None:
        self.device = device

    def refuses(self, race: Race) -> str | None:
        """Dropout, a bias with a gradient, statistics."""
        if race.dropout or race.bias:
            return "no dropout" if race.dropout else "no bias with a gradient"
        return "no statistics" if race.see else None


def peers_on(device: str) -> dict[str, Contender]:
    """The peers with their tensors there."""
    peers = (*(Backend(name, device) for name in BACKENDS), FlexOnDevice(device), Dense(device))
    return {peer.name: peer for peer in peers}
