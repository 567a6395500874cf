"""The serving example: its tokens are those of `generate`, and what clients meet over HTTP."""

import copy
import http.client
import json
import queue
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

FOLDER = Path(__file__).parents[1] / "examples"
SYSTEM = "Speak the truth, and speak it plainly; if you do not know it, then say that you do not know it."


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    chat_template = None

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": list(text.encode())})

    def decode(self, ids, **_):
        return bytes(one % 256 for one in ids).decode(errors="replace")


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(FOLDER))
    import serve

    yield serve
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=60,
        eos_token_id=255,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_engine(serve, model, **options):
    return serve.Engine(copy.deepcopy(model), Bytes(), **{"dtype": None, "memory": 10**8, "system": SYSTEM, **options})


def expected(model, ids, count):
    model.set_attn_implementation("eager")
    found = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()
    return found[: found.index(255)] if 255 in found else found


def collect(tokens):
    return list(iter(tokens.get, None))


WAYS = {"a shared system prompt": (True, True), "copies of it": (True, False), "without": (False, False)}


@pytest.mark.parametrize(("begins", "shares"), WAYS.values(), ids=WAYS)
def test_requests_that_join_and_leave_generate_as_alone(serve, model, begins, shares):
    check_requests(serve, model, begins, shares)


@pytest.mark.parametrize("name", ["Gemma 2", "GPT-OSS"])
def test_soft_caps_windows_of_some_layers_and_sinks(serve, name):
    from tiny_models import make_model

    check_requests(serve, make_model(name, vocab_size=256, max_position_embeddings=1024, eos_token_id=255), True)


def check_requests(serve, model, begins, shares=True):
    prefix = list((SYSTEM + "\n").encode()) if begins else []
    prompts = [prefix + list(text.encode()) for text in ("a", "What is a whale? " * 30, "Tell me more.", "b" * 77)]
    counts = [30, 12, 1, 21]
    wanted = [expected(model, ids, count) for ids, count in zip(prompts, counts, strict=True)]
    engine = make_engine(serve, model, shares=shares)
    before, answers = engine.reserved, []
    for ids, count in zip(prompts, counts, strict=True):
        answers.append(queue.Queue())
        request = engine.submit(ids, count, 0.0, answers[-1].put)
        assert (request.computed > 0) == begins
        assert (request.caches[0].prefix is not None) == (begins and shares)
        time.sleep(0.01)
    assert [collect(tokens) for tokens in answers] == wanted
    assert engine.reserved == before
    assert not engine.running


def test_quantized_caches_take_a_quarter_of_the_memory(serve, model):
    engines = [make_engine(serve, model, dtype=dtype) for dtype in (None, "int8")]
    assert engines[1].bytes_per_token < 0.3 * engines[0].bytes_per_token
    tokens = queue.Queue()
    engines[1].submit(list(b"Hello"), 5, 0.7, tokens.put)
    assert 0 <= len(collect(tokens)) <= 5


def test_a_step_that_fails_ends_its_requests_alone(serve, model, monkeypatch, capsys):
    engine, tokens = make_engine(serve, model), queue.Queue()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "model", None)
        request = engine.submit(list(b"Hello"), 5, 0.0, tokens.put)
        assert collect(tokens) == []
    assert request.reason == "error"
    assert "TypeError" in capsys.readouterr().err
    engine.submit(list(b"Hello"), 5, 0.0, tokens.put)
    assert collect(tokens) == expected(model, list(b"Hello"), 5)


def test_a_request_that_fails_ends_alone(serve, model, capsys):
    engine, tokens = make_engine(serve, model), queue.Queue()
    engine.submit(list(b"Hello"), 30, 0.0, tokens.put)
    faulty = [engine.submit(list(b"Hello"), 30, *options) for options in ((0.0, None), (10**400, lambda token: None))]
    assert collect(tokens) == expected(model, list(b"Hello"), 30)
    assert [request.reason for request in faulty] == ["error"] * 2
    assert capsys.readouterr().err.count("Traceback") == 2
    for temperature in (1e-300, 5e-324):
        engine.submit(list(b"Hello"), 30, temperature, tokens.put)
        assert collect(tokens) == expected(model, list(b"Hello"), 30)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(serve, model):
    engine = make_engine(serve, model, memory=2_000_000)
    found = uvicorn.Server(uvicorn.Config(serve.make_app(engine), port=0, log_level="error"))
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    while not found.started:
        time.sleep(0.01)
    yield engine, found.servers[0].sockets[0].getsockname()[1]
    found.should_exit = True
    thread.join(10)


def connect(port):
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30))


def read(port, path, body=None):
    """Return the status, the headers and the body of the answer."""
    with connect(port) as connection:
        method = "GET" if body is None else "POST"
        connection.request(method, path, body if isinstance(body, str) else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def test_a_completion_and_a_streamed_one_have_the_same_text(server, model):
    _engine, port = server
    body = {"prompt": "Once upon a time", "max_tokens": 20}
    found = json.loads(read(port, "/v1/completions", body)[2])
    whole = found["choices"][0]["text"]
    assert found["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": 16, "completion_tokens": 20, "total_tokens": 36}
    assert found["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert whole == Bytes().decode(expected(model, list(b"Once upon a time"), 20)).rstrip("\N{REPLACEMENT CHARACTER}")
    events = read(port, "/v1/completions", body | {"stream": True})[2].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in events[:-2]]
    assert "".join(pieces) == whole
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    stop = whole[5:8]
    stopped = read(port, "/v1/completions", body | {"stop": stop, "stream": True})[2].split("\n\n")[:-2]
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in stopped]
    assert "".join(choice["text"] for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


def test_a_conversation_begins_with_the_system_prompt(server, model):
    _engine, port = server
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 9}
    answer = json.loads(read(port, "/v1/chat/completions", body)[2])
    text = Bytes().decode(expected(model, list(f"{SYSTEM}\nHello\n".encode()), 9))
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(SYSTEM) + 1}
    events = read(port, "/v1/chat/completions", body | {"stream": True})[2].split("\n\n")[:-2]
    pieces = [json.loads(one.removeprefix("data: ")) for one in events]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert len({piece["id"] for piece in pieces} - {answer["id"]}) == 1


def test_beyond_the_memory_a_client_gets_503_if_it_may_try_again(server, monkeypatch):
    engine, port = server
    status, headers, text = read(port, "/v1/completions", {"prompt": "x" * 900, "max_tokens": 4000})
    assert (status, headers["Retry-After"]) == (400, None)
    assert "--memory" in json.loads(text)["error"]["message"]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reserved", engine.memory)
        status, headers, text = read(port, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "2.0 of 2.0 MB" in json.loads(text)["error"]["message"]
    assert read(port, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


BAD = {
    "no JSON": "a body that is not JSON: Expecting value",
    "[]": "a body of type list",
    "{}": "prompt=None",
    '{"prompt": ["a"]}': "prompt=['a']; allowed: a text",
    '{"prompt": ""}': "0 tokens",
    '{"prompt": "a", "max_tokens": -1}': "max_tokens=-1",
    '{"prompt": "a", "max_tokens": "many"}': "max_tokens='many'; allowed: a whole number from 1",
    '{"prompt": "a", "max_tokens": 1000000}': "the model's context",
    '{"prompt": "a", "temperature": "hot"}': "temperature='hot'",
    '{"prompt": "a", "stop": [3]}': "stop=[3]; allowed: a text, or a list of texts",
    '{"prompt": "a", "stop": [""]}': "stop=['']",
    '{"prompt": "a", "n": 2}': "n=2",
    '{"prompt": "a", "logprobs": 3}': "logprobs=3; allowed: no logprobs",
    '{"prompt": "a", "max_completion_tokens": 0}': "max_tokens=0",
    f'{{"prompt": "a", "temperature": {10**400}}}': "allowed: a number from 0 to 2",
    '{"prompt": "a", "temperature": true}': "temperature=True",
    '{"prompt": "a", "stream": "no"}': "stream='no'",
    '{"prompt": "a", "stop": [' + '"z", ' * 16 + '"z"]}': "a list of texts, at most 16",
    '{"prompt": "a", "model": "\\ud800"}': "surrogates not allowed",
    '{"prompt": ' + "[" * 50_000: "a body that is not JSON",
}


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:50])
def test_bad_requests_are_answered_with_what_is_allowed(server, body):
    engine, port = server
    status, _, text = read(port, "/v1/completions", body)
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    assert BAD[body] in json.loads(text)["error"]["message"]
    assert not engine.running


def test_no_client_waits_for_the_prompt_of_another(server, serve, monkeypatch):
    """A long body is refused before it is parsed. While a prompt is tokenized, other clients get their answers."""
    engine, port = server
    with monkeypatch.context() as patch:
        patch.setattr(engine, "tokenizer", None)
        status, _, text = read(port, "/v1/completions", {"prompt": "a" * 20_000_000})
        assert (status, "1,048,576 bytes" in text) == (413, True)
        assert read(port, "/v1/completions", {"prompt": "a"})[0] == 500
    answered = threading.Event()
    monkeypatch.setattr(engine, "tokenizer", lambda _: [answered.wait(60)])
    with connect(port) as waiting:
        waiting.request("POST", "/v1/completions", json.dumps({"prompt": "a"}))
        assert read(port, "/status")[0] == 200
        answered.set()


@pytest.mark.parametrize("messages", [None, "Hello", [], ["Hello"], [{"content": "a"}], [{"role": "user"}]])
def test_bad_conversations(server, messages):
    status, _, text = read(server[1], "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "role" in json.loads(text)["error"]["message"]


def test_parameters_that_ask_for_nothing_are_accepted(server):
    body = {"prompt": "a", "max_tokens": 2, "n": 1, "tools": [], "logprobs": None, "stop": None, "top_p": 1, "seed": 3}
    assert read(server[1], "/v1/completions", body)[0] == 200


@pytest.mark.parametrize("options", [{"stream": True}, {}, {"stop": 99 * "longer than the answer "}])
def test_a_client_that_goes_away_leaves_the_batch(server, options, monkeypatch):
    engine, port = server
    before = engine.reserved
    monkeypatch.setattr(engine, "ends", set())
    body = {"prompt": "long", "max_tokens": 1500, "temperature": 1.5, **options}
    with connect(port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        if "stream" in options:
            connection.getresponse().fp.readline()
        while not engine.running:
            time.sleep(0.005)
        request = engine.running[0]
    deadline = time.monotonic() + 20
    while engine.reserved > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.reserved == before
    assert 0 < request.generated < 1500
    status = json.loads(read(port, "/status")[2])
    assert (status["running"], status["cache_bytes_limit"]) == (0, 2_000_000)
