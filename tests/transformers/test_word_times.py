"""`word_timestamps`: tokens and times of transformers' own eager path, with the weights of few heads."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.errors import ParameterError
from sightline.transformers import word_timestamps
from speech import RATE, load_trained_whisper, make_tiny_whisper, speak

# transformers warns of NumPy 2, and where a window has one token or no frames
pytestmark = [pytest.mark.filterwarnings("ignore:__array_wrap__", "ignore:std")]
HEADS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5)
TEXT = "The museum opens every morning at nine. My sister bought three green apples at the market yesterday."


def generate_eagerly(model, processor, waves, **options):
    """Return the tokens and the times of each segment of each audio, as transformers finds them by itself."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    extractor = processor.feature_extractor
    is_long = max(map(len, waves)) > extractor.n_samples
    features = extractor(
        waves,
        sampling_rate=RATE,
        return_tensors="pt",
        return_attention_mask=True,
        **({"truncation": False, "padding": "longest"} if is_long else {}),
    ).to(dtype=model.dtype)
    options = {"return_timestamps": True, **options}
    found = model.generate(**features, return_token_timestamps=True, return_segments=True, **options)
    return [
        [(s["tokens"].tolist(), [round(t, 2) for t in s["token_timestamps"].tolist()]) for s in segments]
        for segments in found["segments"]
    ]


def read(transcripts):
    return [[(list(s.tokens), list(s.times)) for s in transcript.segments] for transcript in transcripts]


def with_words(segments, processor):
    """Return the segments with a token of text, as a transcript has them."""
    special = processor.tokenizer.all_special_ids
    first = processor.tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1
    return [[s for s in some if any(t < first and t not in special for t in s[0])] for some in segments]


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    heads=HEADS,
    lengths=st.lists(st.integers(RATE // 5, 5 * RATE // 2), min_size=1, max_size=3),
    beams=st.integers(1, 3),
    language=st.sampled_from([None, "en", "zh"]),
    task=st.sampled_from(["transcribe", "translate"]),
    prompt=st.booleans(),
    plain=st.booleans(),
)
def test_tokens_and_times_are_those_of_the_eager_path(seed, heads, lengths, beams, language, task, prompt, plain):
    model, processor = make_tiny_whisper(seed, heads)
    rng = np.random.default_rng(seed)
    waves = [rng.normal(size=n).astype(np.float32) for n in lengths]
    options = {"num_beams": beams, "language": language, "task": task}
    if prompt:
        options["prompt_ids"] = torch.from_numpy(processor.get_prompt_ids("abc"))
    if plain and max(lengths) <= processor.feature_extractor.n_samples:
        options["return_timestamps"] = False
    expected = generate_eagerly(model, processor, waves, **options)
    transcripts = word_timestamps(model, processor, waves, RATE, **options)
    assert read(transcripts) == with_words(expected, processor)
    for transcript in transcripts:
        for segment in transcript.segments:
            assert segment.language == {"en": "english", "zh": "chinese"}.get(language, segment.language)
            assert all(0 < word.probability <= 1 for word in segment.words)


@pytest.mark.wide
def test_a_trained_model_equals_the_eager_path_and_the_pipeline():
    model, processor = load_trained_whisper()
    model.double()  # the rounding of float32 may move a time by a frame
    wave, spoken = speak(TEXT)
    transcript = word_timestamps(model, processor, wave, RATE)
    assert read([transcript]) == generate_eagerly(model, processor, [wave])
    pipeline = transformers.pipeline(
        "automatic-speech-recognition",
        copy.deepcopy(model),
        dtype=torch.float64,
        tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
    )
    chunks = pipeline(wave, return_timestamps="word", generate_kwargs={"num_beams": 1})["chunks"]  # else 5
    assert [(word.text, (word.start, word.end)) for word in transcript] == [
        (chunk["text"], chunk["timestamp"]) for chunk in chunks
    ]
    starts = {word: start for word, start, _ in spoken}
    known = [abs(word.start - starts[name]) for word in transcript if (name := word.text.strip(" .")) in starts]
    assert len(known) > 12
    assert np.median(known) < 0.2


@pytest.mark.wide
def test_long_audio_equals_the_eager_path():
    model, processor = load_trained_whisper()
    model.double()
    wave = np.concatenate([speak(TEXT)[0]] * 6)
    assert len(wave) > 30 * RATE
    transcript = word_timestamps(model, processor, wave, RATE)
    assert read([transcript]) == generate_eagerly(model, processor, [wave])
    assert transcript.text.count("museum") == 6


def test_only_alignment_heads_return_weights_and_the_model_is_restored():
    model, processor = make_tiny_whisper(0, [(2, 3), (1, 0), (2, 0), (2, 3)])
    model.set_attn_implementation("sdpa")
    returned = {}
    for name, module in model.named_modules():
        if name.endswith("attn"):
            module.register_forward_hook(lambda module, args, output, name=name: returned.update({name: output[1]}))
    state = dict(vars(model)), type(model.config), dict(vars(model.config))
    word_timestamps(model, processor, np.ones(RATE), RATE, language="en")
    counts = {name: weights.shape[1] for name, weights in returned.items() if weights.shape[1]}
    assert counts == {"model.decoder.layers.1.encoder_attn": 1, "model.decoder.layers.2.encoder_attn": 2}
    with pytest.raises(ValueError, match="xx"):
        word_timestamps(model, processor, np.ones(RATE), RATE, language="xx")
    assert (dict(vars(model)), type(model.config), dict(vars(model.config))) == state
    assert model.config._attn_implementation == "sdpa"


def test_one_array_gives_a_transcript_and_a_list_a_list():
    model, processor = make_tiny_whisper(2, [(0, 0)])
    wave = np.random.default_rng(0).normal(size=RATE)
    one = word_timestamps(model, processor, torch.from_numpy(wave), RATE, language="zh")
    assert word_timestamps(model, processor, [wave], RATE, language="zh") == [one]
    assert one.text == "".join(word.text for word in one)
    words = one.segments[0].words
    assert [word.start for word in words[1:]] == [word.end for word in words[:-1]]
    assert words[0].start < words[-1].start
    assert (one.segments[0].start, one.segments[-1].end) == (one.words[0].start, one.words[-1].end)


def test_threads_share_a_model():
    model, processor = make_tiny_whisper(3, [(0, 1), (2, 3)])
    waves = np.random.default_rng(0).normal(size=(3, 20_000)).astype(np.float32)

    def transcribe(wave):
        return word_timestamps(model, processor, wave, RATE, language="en")

    expected = [transcribe(wave) for wave in waves]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(transcribe, [*waves, *waves])) == [*expected, *expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "WhisperForConditionalGeneration"),
        ({"processor": None}, "WhisperProcessor"),
        ({"heads": None}, r"\[\[layer, head\] for layer in range\(1, 3\) for head in range\(4\)\]"),
        ({"heads": [(3, 0)]}, "a layer below 3 and a head below 4"),
        ({"rate": 8000}, "resample_poly"),
        ({"bins": 80}, "80 mel bins for a model of 8"),
        ({"audio": np.zeros(9, np.int16)}, "audio / 32768"),
        ({"audio": np.zeros((2, 9))}, r"shape \(2, 9\)"),
        ({"audio": []}, "no audio"),
        ({"audio": "speech.wav"}, "soundfile.read"),
        ({"audio": Path("speech.wav")}, "soundfile.read"),
        ({"audio": [np.zeros(9), np.zeros(0)]}, r"shape \(0,\)"),
        ({"return_segments": False}, "return_segments"),
    ],
)
def test_mistakes_are_named(change, message):
    change = dict(change)
    model, processor = make_tiny_whisper(0, change.pop("heads", [(1, 0)]))
    if "bins" in change:
        processor.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=change.pop("bins"))
    model, processor = change.pop("model", model), change.pop("processor", processor)
    audio, rate = change.pop("audio", np.zeros(RATE)), change.pop("rate", RATE)
    with pytest.raises(ParameterError, match=message):
        word_timestamps(model, processor, audio, rate, **change)
