"""Labels of positions in models without tokens: patches of timm's vision transformers, audio of openai-whisper.

Hooks read the shape of the model's input. `sightline.transformers` labels the models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...statistics.recording import Tokens

WHISPER_FRAME = 0.02  # seconds between two positions of Whisper's encoder: 2 columns of its spectrogram, 10 ms each


@dataclass(frozen=True)
class PositionLabels:
    """The labels of a call's positions, and the number of positions before its first query."""

    tokens: Tokens | None = None
    start: int = 0


def frame_labels(count: int) -> list[str]:
    """Return the seconds at which the frames of Whisper's encoder start in their window: "0.00 s", "0.02 s", …"""
    return [f"{k * WHISPER_FRAME:.2f} s" for k in range(count)]


def patch_labels(first: list[str], registers: int, rows: int, columns: int) -> list[str]:
    """Return the labels `first`, one for each register, and "row,column" of each patch, in the model's order."""
    named = [f"register {k + 1}" for k in range(registers)]
    return [*first, *named, *(f"{row},{column}" for row in range(rows) for column in range(columns))]


class PositionReader:
    """Reads the labels of positions while a model runs. `current` has the labels for the calls that follow."""

    def __init__(self) -> None:
        self.current = PositionLabels()

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[PositionReader]:
        """Read labels while the context lasts."""
        with ExitStack() as exit_stack:
            for module in model.modules():
                found = None if isinstance(module, torch.jit.ScriptModule) else self._find_reader(module)
                if found is not None:
                    target, read = found
                    exit_stack.callback(target.register_forward_pre_hook(read, with_kwargs=True).remove)
            yield self

    def _find_reader(self, module: nn.Module) -> tuple[nn.Module, Any] | None:
        """Return (a module, the hook that reads labels from its input), or None for a module that is not known."""
        embed, prefix = getattr(module, "patch_embed", None), getattr(module, "num_prefix_tokens", None)
        size = getattr(embed, "patch_size", None)
        if isinstance(embed, nn.Module) and isinstance(prefix, int) and isinstance(size, tuple) and len(size) == 2:
            special = {"cls_token": "class", "dist_token": "distillation"}
            first = [label for name, label in special.items() if getattr(module, name, None) is not None]
            return embed, partial(self._read_image, first, prefix - len(first), size)
        readers = {"AudioEncoder": self._read_spectrogram, "TextDecoder": self._read_audio}
        read = readers.get(type(module).__name__) if type(module).__module__ == "whisper.model" else None
        return read and (module, read)

    def _read_image(
        self, first: list[str], registers: int, size: tuple[int, int], _: nn.Module, inputs: Any, __: dict[str, Any]
    ) -> None:
        """Set the labels of the patches of images (batch, channels, height, width)."""
        image = inputs[0] if inputs else None
        if isinstance(image, Tensor) and image.ndim == 4:
            rows, columns = (given // one for given, one in zip(image.shape[-2:], size, strict=True))
            self.current = PositionLabels([patch_labels(first, registers, rows, columns)] * len(image))

    def _read_spectrogram(self, _: nn.Module, inputs: Any, __: dict[str, Any]) -> None:
        """Set the labels of the frames of spectrograms (batch, mels, columns)."""
        self.current = PositionLabels({"encoder": [frame_labels(-(-inputs[0].shape[-1] // 2))] * len(inputs[0])})

    def _read_audio(self, _: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        """Set the labels of the audio's features (batch, frames, width), and the number of tokens in the cache."""
        audio, cache = inputs[1] if len(inputs) > 1 else options["xa"], options.get("kv_cache")
        start = int(next(iter(cache.values())).shape[1]) if cache else 0
        self.current = PositionLabels({"encoder": [frame_labels(audio.shape[1])] * len(audio)}, start)
