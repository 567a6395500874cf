"""The tokens of a watched model's inputs, which label the positions of its recording.

Hooks on the model read the ids of the tokens that the model is called with. A tokenizer turns the ids into strings when
the labels are read for the first time, so no tokenizer is loaded if nobody reads the labels. The positions of Whisper's
encoder are frames of audio, and their labels are times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ..arrays.caching import cached_property
from ..errors import ParameterError
from ..statistics.recording import Tokens
from ..torch.interception import in_eager_code
from ..torch.layer_calls import wrapping
from ..torch.watching.position_labels import frame_labels, patch_labels
from .compatibility import cache_of
from .model_contexts import submodels, using_sightline

PREPARE = "prepare_inputs_for_generation"
PADDING = -1  # replaces the id of a padding token at the end of a text
Ids = list[list[int | None]]  # for each batch entry the ids of its positions; None for an id that no recording has read


class Tokenizer:
    """The tokenizer of a model: a given one, or else the one in the folder that the model was loaded from.

    name : `model.config.name_or_path`, used if it is a folder, or a model in the local cache of huggingface_hub
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
            cure = "tokenizer=transformers.AutoTokenizer.from_pretrained(path)"
            raise ParameterError(f"tokenizer of type {type(tokenizer).__name__}", "a tokenizer of transformers", cure)
        self.given, self.name = tokenizer, name

    @cached_property
    def loaded(self) -> Any:
        """The tokenizer; None if there is none on this machine."""
        if self.given is not None:
            return self.given
        folder = _local_folder(self.name)
        try:
            return folder and AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception:  # The folder has no tokenizer. Libraries raise errors of many classes then.
            return None

    def tokens(self, ids: list[int | None]) -> list[str]:
        """Return a string for each id of a text: the token, "" for padding, and the position for an unknown id."""
        known = [number for number in ids if number is not None and number != PADDING]
        strings = iter(self.loaded.convert_ids_to_tokens(known))
        return [
            str(place) if number is None else "" if number == PADDING else str(next(strings))
            for place, number in enumerate(ids)
        ]


def _local_folder(name: str) -> Path | None:
    """Return the local folder that has the files of a model; None if they are not on this machine."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, "tokenizer_config.json")
    except ValueError:  # `name` is no name of a model
        return None
    return Path(cached).parent if isinstance(cached, str) else None


@dataclass(frozen=True)
class InputIds:
    """The ids of the tokens that were known when a layer ran, from which the labels of the positions are made.

    `by_side` has the ids of "encoder" and "decoder", or of "" for a model of one sequence. `start` positions were in
    the cache before the run. `positions` is (side, number of inputs, labels of each) for the frames of Whisper's
    encoder, and for the patches of a model that reads only images.
    """

    by_side: dict[str, Ids]
    tokenizer: Tokenizer
    start: int = 0
    positions: tuple[str, int, list[str]] | None = None

    @cached_property
    def tokens(self) -> Tokens | None:
        """The labels of the positions; None if there is no tokenizer, no audio and no image."""
        labels: Any = {}
        if self.by_side and self.tokenizer.loaded is not None:
            labels = {side: [self.tokenizer.tokens(row) for row in ids] for side, ids in self.by_side.items()}
        if self.positions is not None:
            side, count, names = self.positions
            count = max([count, *map(len, self.by_side.values())])  # a beam search decodes an audio several times
            labels[side] = [names] * count
        return labels.get("", labels) or None


class TokenRecorder:
    """Reads the ids of the tokens with which a model is called. `current` has the ids that are known so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.current = InputIds({}, tokenizer)
        self.generated: Tensor | None = None  # the sequences of `generate`, before the model gets their last tokens

    @contextmanager
    def record(self) -> Iterator[TokenRecorder]:
        """Read the ids while the context lasts."""
        model = self.model
        if model.config.is_encoder_decoder:
            sides = [("encoder", model.get_encoder()), ("decoder", model.get_decoder())]
        else:
            sides = [("", module) for module in submodels(model)]
        with ExitStack() as exit_stack:
            for side, module in sides:
                hook = module.register_forward_pre_hook(self._hook(side, module), with_kwargs=True)
                exit_stack.callback(hook.remove)
            if hasattr(model, PREPARE):  # `generate` calls it with all ids
                exit_stack.enter_context(wrapping(model, PREPARE, self._prepare))
            yield self

    def _prepare(self, prepare: Callable[..., Any], input_ids: Any, *inputs: Any, **options: Any) -> Any:
        self.generated = input_ids
        return prepare(input_ids, *inputs, **options)

    def _hook(self, side: str, module: nn.Module) -> Any:
        signature = inspect.signature(module.forward)

        @in_eager_code  # a compiled model records nothing
        def read(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            call_inputs = signature.bind_partial(*inputs, **options).arguments
            call_inputs |= call_inputs.pop("kwargs", {})
            ids, spectrogram = call_inputs.get("input_ids"), call_inputs.get("input_features")
            if side == "encoder" and self.model.config.model_type == "whisper" and isinstance(spectrogram, Tensor):
                frames = frame_labels(-(-spectrogram.shape[-1] // 2))
                self.current = InputIds({}, self.tokenizer, positions=(side, len(spectrogram), frames))
            image, size = call_inputs.get("pixel_values"), getattr(self.model.config, "patch_size", None)
            if not side and not self.current.by_side and isinstance(image, Tensor) and isinstance(size, int):
                registers = getattr(self.model.config, "num_register_tokens", 0)
                patches = patch_labels(["class"], registers, image.shape[-2] // size, image.shape[-1] // size)
                self.current = InputIds({}, self.tokenizer, positions=(side, len(image), patches))
            if isinstance(ids, Tensor) and ids.ndim == 2:
                self._add(side, ids, call_inputs.get("attention_mask"), cache_of(call_inputs))

        return read

    def _add(self, side: str, ids: Tensor, mask: Any, cache: Any) -> None:
        """Add the ids of a call to `current`, after the ids of the positions in the cache, or as a new text."""
        start = int(cache.get_seq_length()) if side != "encoder" and cache is not None else 0
        count, generated = start + ids.shape[1], None if side == "encoder" else self.generated
        known: Ids = self.current.by_side.get(side, [])
        known = known if len(known) == len(ids) else [[]] * len(ids)
        rows = [(row + [None] * start)[:start] + new for row, new in zip(known, ids.tolist(), strict=True)]
        if generated is not None and generated.shape == (len(ids), count):
            rows = generated.tolist()  # a beam search reorders the sequences, so earlier ids are read again
        if isinstance(mask, Tensor) and mask.shape == (len(ids), count):
            lengths = [max(row.nonzero().flatten().tolist(), default=-1) + 1 for row in mask]
            rows = [row[:length] + [PADDING] * (count - length) for row, length in zip(rows, lengths, strict=True)]
        known_start = self.current.start if side == "encoder" else start
        by_side = {**self.current.by_side, side: rows}
        positions = self.current.positions
        kept = positions if positions is not None and positions[0] not in by_side else None
        self.current = InputIds(by_side, self.tokenizer, known_start, kept)


@contextmanager
def recording_tokens(model: nn.Module, tokenizer: Any) -> Iterator[TokenRecorder | None]:
    """Let a model use "sightline", and record the tokens of the model in it that contains all others.

    If several models are outermost, None is yielded.
    """
    models = submodels(model)
    inner = {id(module) for submodel in models for module in submodel.modules() if module is not submodel}
    outermost = [submodel for submodel in models if id(submodel) not in inner]
    source = Tokenizer(tokenizer, outermost[0].config.name_or_path)
    with using_sightline(model):
        if len(outermost) > 1:
            yield None
        else:
            with TokenRecorder(outermost[0], source).record() as recorder:
                yield recorder
