"""`word_timestamps` finds when each word of a recording was said, from Whisper's cross-attention weights.

`generate` of transformers finds tokens and times. It asks for the weights of every layer and head, and keeps all
weights and scores until the whole audio is done. Here the layers return only the weights of the alignment heads. After
each window of 30 seconds, only its tokens, times and probabilities are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from ..errors import ParameterError
from ..torch.layer_calls import registering
from .attention_interface import RETURNED_HEADS
from .compatibility import LANGUAGES, combine_tokens_into_words, generating_windows
from .model_contexts import find_attention_layers

Audio = NDArray[Any] | Tensor
RESERVED = ("return_dict_in_generate", "return_segments", "return_token_timestamps", "num_return_sequences")


@dataclass(frozen=True)
class Word:
    """A word of a transcript.

    Attributes
    ----------
    text : the word with its punctuation, after a space where the language has spaces
    start, end : seconds from the start of the audio, in steps of 0.02
    probability : the mean of the probabilities of the word's tokens, after generation excluded some tokens
    """

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """One of the parts into which `generate` divides a transcript, with at least one word.

    Attributes
    ----------
    words : tuple of Word
    tokens : tuple of int
        The ids of the tokens, timestamp tokens included.
    times : tuple of float
        For each token, its end in seconds from the start of the audio, by `generate(return_token_timestamps=True)`.
    language : str, optional
        The name of the language, such as "english"; None for a model of one language.
    """

    words: tuple[Word, ...]
    tokens: tuple[int, ...]
    times: tuple[float, ...]
    language: str | None

    @property
    def text(self) -> str:
        """The words as one string."""
        return "".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        """The start of the first word, in seconds from the start of the audio."""
        return self.words[0].start

    @property
    def end(self) -> float:
        """The end of the last word, in seconds from the start of the audio."""
        return self.words[-1].end


@dataclass(frozen=True)
class Transcript:
    """The transcript of one audio; a loop over it yields its words.

    Attributes
    ----------
    segments : tuple of Segment
    """

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The words as one string."""
        return "".join(segment.text for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of all segments."""
        return tuple(self)

    def __iter__(self) -> Iterator[Word]:
        return (word for segment in self.segments for word in segment.words)


@overload
def word_timestamps(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    audio: Audio,
    sampling_rate: int,
    **options: Any,
) -> Transcript: ...
@overload
def word_timestamps(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    audio: Sequence[Audio],
    sampling_rate: int,
    **options: Any,
) -> list[Transcript]: ...
def word_timestamps(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    audio: Audio | Sequence[Audio],
    sampling_rate: int,
    **options: Any,
) -> Transcript | list[Transcript]:
    """Transcribe speech with a Whisper model of transformers, and find when each word was said.

    Tokens and times are those of `model.generate(..., return_token_timestamps=True)`. In each window of 30 seconds,
    `generate` normalises and smooths the weights of the alignment heads, and finds the tokens' path through the weights
    by dynamic time warping. Here this library computes attention instead of "eager", only the alignment heads return
    weights, and a window's weights are dropped after the window. The model's `attn_implementation` stays as it is.

    Parameters
    ----------
    model : transformers.WhisperForConditionalGeneration
        `model.generation_config.alignment_heads` lists (layer, head) of the decoder's cross-attention.
    processor : transformers.WhisperProcessor
    audio : floats of shape (samples,), or a list of such arrays, which are one batch
        One channel, of any length; the usual range is −1 to 1.
    sampling_rate : int
        Samples in a second. It must be the processor's, 16,000.
    options
        Of `model.generate`, such as `language="de"`, `task="translate"`, `num_beams=5` or `return_timestamps=True`.

    Returns
    -------
    Transcript, or a list of transcripts if `audio` is a list

    Raises
    ------
    ParameterError
        The model is no Whisper or has no valid alignment heads, the processor is no WhisperProcessor or has another
        number of mel bins than the model, the audio is not of floats or has several channels, the sampling rate is not
        the processor's, or `options` has an option that this function sets.

    Notes
    -----
    As in `generate`, the times of an entry of a batch depend a little on the other entries, because the padding behind
    its last token is aligned too. Call the function for each audio if that matters.

    References
    ----------
    Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision.
    """
    heads = _check_model(model, options.get("generation_config"))
    waves = _check_audio(model, processor, audio, sampling_rate)
    for name in RESERVED:
        if name in options:
            raise ParameterError(f"{name}={options[name]!r}", "other options of model.generate", f"leave out {name}=")
    extractor = processor.feature_extractor
    wanted = {"sampling_rate": sampling_rate, "return_tensors": "pt", "return_attention_mask": True}
    if max(map(len, waves)) > extractor.n_samples:
        wanted |= {"truncation": False, "padding": "longest"}
    features = extractor(waves, **wanted).to(model.device, model.dtype)
    options = {"return_timestamps": True, **options, "return_token_timestamps": True, "return_segments": True}
    with _returning(model, heads):
        found = model.generate(**features, **options)
    transcripts = [_read_transcript(processor.tokenizer, segments) for segments in found["segments"]]
    return transcripts if isinstance(audio, Sequence) else transcripts[0]


def _check_model(model: Any, config: Any) -> list[tuple[int, int]]:
    """Return the alignment heads of the model as (layer, head); raise ParameterError if it has no valid ones."""
    if not isinstance(model, WhisperForConditionalGeneration):
        given, allowed = f"a model that is a {type(model).__name__}", "transformers.WhisperForConditionalGeneration"
        raise ParameterError(given, allowed, "WhisperForConditionalGeneration.from_pretrained(path)")
    heads = getattr(config or model.generation_config, "alignment_heads", None)
    layers, count = model.config.decoder_layers, model.config.decoder_attention_heads
    if not heads or not all(0 <= layer < layers and 0 <= head < count for layer, head in heads):
        raise ParameterError(
            f"a Whisper with alignment_heads={heads}",
            f"pairs of a layer below {layers} and a head below {count}",
            "model.generation_config.alignment_heads = the list in generation_config.json of the checkpoint, or, as "
            "openai-whisper does without a list, all heads of the upper layers: "
            f"[[layer, head] for layer in range({layers // 2}, {layers}) for head in range({count})]",
        )
    return [(layer, head) for layer, head in heads]


def _check_audio(model: Any, processor: Any, audio: Any, sampling_rate: Any) -> list[NDArray[Any]]:
    """Return the audio as a list of float32 arrays of one axis; raise ParameterError for arguments that do not fit."""
    if not isinstance(processor, WhisperProcessor):
        given = f"a processor that is a {type(processor).__name__}"
        allowed = "transformers.WhisperProcessor, which has a feature extractor and a tokenizer"
        raise ParameterError(given, allowed, "WhisperProcessor.from_pretrained(path)")
    extractor, bins = processor.feature_extractor, model.config.num_mel_bins
    if extractor.feature_size != bins:
        given = f"a processor of {extractor.feature_size} mel bins for a model of {bins}"
        raise ParameterError(given, "the processor of the model's checkpoint", "WhisperProcessor.from_pretrained(path)")
    if sampling_rate != extractor.sampling_rate:
        given = f"sampling_rate={sampling_rate!r}"
        cure = f"scipy.signal.resample_poly(audio, {extractor.sampling_rate}, {sampling_rate})"
        raise ParameterError(given, f"{extractor.sampling_rate}, the rate of the processor", cure)
    if isinstance(audio, (str, bytes, PathLike)):
        raise ParameterError(
            f"audio={audio!r}, a file",
            "an array of the file's samples",
            'audio, sampling_rate = soundfile.read("speech.wav", dtype="float32"), and audio.mean(1) for two channels',
        )
    audios = audio if isinstance(audio, Sequence) else [audio]
    if not len(audios):
        raise ParameterError("no audio: an empty list", "one array or more", "audio=[array]")
    waves = [np.asarray(wave.cpu() if isinstance(wave, Tensor) else wave) for wave in audios]
    for wave in waves:
        if wave.ndim != 1 or wave.dtype.kind != "f" or not len(wave):
            given = f"audio of shape {wave.shape} and dtype {wave.dtype}"
            cure = "audio.mean(channel_axis) for several channels, audio / 32768 for int16"
            raise ParameterError(given, "floats of shape (samples,), or a list of such arrays", cure)
    return [wave.astype(np.float32) for wave in waves]


@contextmanager
def _returning(model: Any, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Let layers return only the weights of these heads, and `generate` keep only what a transcript needs."""
    of_layer: dict[int, list[int]] = {layer: [] for layer in range(model.config.decoder_layers)}
    for layer, head in dict.fromkeys(heads):
        of_layer[layer].append(head)
    returned: dict[nn.Module, tuple[int, ...]] = dict.fromkeys(find_attention_layers(model).values(), ())
    returned |= {model.model.decoder.layers[layer].encoder_attn: tuple(some) for layer, some in of_layer.items()}

    def generate_windows(generate: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options["generation_config"].alignment_heads = [[layer, of_layer[layer].index(head)] for layer, head in heads]
        results = generate(*args, **options)
        for output in results[1]:
            _reduce(output, options["decoder_input_ids"].shape[-1])
        return results

    with generating_windows(model, generate_windows), registering(RETURNED_HEADS, returned, returned):
        yield


def _reduce(output: dict[str, Any], prefix: int) -> None:
    """Replace the outputs for a window, after `prefix` given tokens, by what a transcript needs, without weights."""
    tokens = output["sequences"][prefix:]
    pairs = zip(tokens, output["scores"], strict=False)  # a beam may end before the others
    probabilities = [float(scores.float().softmax(-1)[token]) for token, scores in pairs]
    kept = {"sequences": output["sequences"], "token_timestamps": output["token_timestamps"]}
    output.clear()
    output.update(kept, prefix=prefix, probabilities=probabilities)


def _read_transcript(tokenizer: Any, segments: Sequence[Mapping[str, Any]]) -> Transcript:
    """Return the transcript of one audio from the segments of `generate`."""
    special = set(tokenizer.all_special_ids)
    first_timestamp = tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1
    read, last = [], 0.0
    for segment in segments:
        output, (first, end) = segment["result"], segment["idxs"]
        prefix = output["prefix"]
        names = tokenizer.convert_ids_to_tokens(output["sequences"][:prefix].tolist())
        language = next((LANGUAGES[name[2:-2]] for name in reversed(names) if name[2:-2] in LANGUAGES), None)
        probabilities = output["probabilities"][first - prefix : end - prefix]
        tokens = segment["tokens"].tolist()
        times = [round(time, 2) for time in segment["token_timestamps"].tolist()]
        starts = [last, *times]  # a token starts where the one before it ends
        last = starts[-1]
        places = [k for k, token in enumerate(tokens) if token not in special and token < first_timestamp]
        texts, _, indices = combine_tokens_into_words(tokenizer, [tokens[k] for k in places], language)
        words = []
        for text, within in zip(texts, indices, strict=True):
            ks = [places[index] for index in within]
            words.append(Word(text, starts[ks[0]], times[ks[-1]], float(np.mean([probabilities[k] for k in ks]))))
        if words:
            read.append(Segment(tuple(words), tuple(tokens), tuple(times), language))
    return Transcript(tuple(read))
