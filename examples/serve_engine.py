"""The engine of serve.py: a model of transformers that continues the prompts of many requests at once.

Each request has a `sightline.KVCache` for each layer. One step runs the model once on one row of tokens: the next token
of every running request, and parts of new prompts. `attend` divides the row among the requests. So a request can join
or leave at any step, no sequence is padded, and no cache is copied when the batch changes. The system prompt is
computed once. The caches of a request are copies of the system prompt's caches, or forks that share its stored keys.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

import sightline
from sightline import KVCache

SYSTEM = "You are a helpful assistant. Answer in plain, short sentences."
PROMPT_STEP = 256  # tokens of new prompts in one step, so that running requests do not wait long


def check(is_allowed: bool, given: str, allowed: str) -> None:
    """Raise ValueError with the texts `given` and `allowed`, unless `is_allowed` is true."""
    if not is_allowed:
        raise ValueError(f"{given[:200]}; allowed: {allowed}")


class OutOfMemoryError(Exception):
    """The caches of one more request would exceed the limit of memory now."""


@dataclass
class Request:
    """A prompt that is being continued."""

    ids: list[int]  # of the prompt, then of the answer
    max_tokens: int
    temperature: float
    caches: list[KVCache]
    nbytes: int  # the most bytes that its caches may take
    send: Callable[[int | None], Any]  # gets each new token, and None at the end
    computed: int = 0  # how many of `ids` the caches hold
    generated: int = 0
    cancelled: bool = False
    reason: str = "length"  # why the answer ends: "length", "stop" or "error"
    shared: int = 0  # tokens of the system prompt that its caches had from the start
    name: str = field(default_factory=lambda: f"request-{uuid4().hex}")

    def next_ids(self) -> list[int]:
        """Return the tokens of the next step: a part of the prompt, or the last token."""
        return self.ids[self.computed : self.computed + PROMPT_STEP]


@dataclass
class Engine:
    """Runs a model for many requests at once, in a thread of its own."""

    model: Any
    tokenizer: Any
    dtype: str | tuple[str, str] | None = "int8"  # of the caches, or of keys and of values; None: the model's
    memory: int = 2 * 10**9  # bytes of all caches
    system: str = SYSTEM
    shares: bool = False  # True: the system prompt is stored once; False: each request has a copy, which is faster
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
        self.prefix = self.encode([], begins=False) if self.system else []
        first.ids = list(self.prefix) or [0]
        for _ in range(0, len(first.ids), PROMPT_STEP):
            self.step([first])
        self.prefix_caches = first.caches
        self.bytes_per_token = sum(cache.nbytes for cache in first.caches) / first.caches[0].capacity
        self.reserved = sum(cache.nbytes for cache in first.caches)
        threading.Thread(target=self.run, daemon=True).start()

    def describe(self) -> str:
        """Return a text that says how many bytes a token takes in the caches, and how many tokens fit."""
        size = self.bytes_per_token
        dtype = " and ".join([self.dtype] if isinstance(self.dtype, str) else self.dtype or ["the model's dtype"])
        return (
            f"{self.name}: keys and values of a token take {size / 1e3:.1f} kB in {dtype}; "
            f"{self.memory / 1e9:g} GB hold {self.memory / size:,.0f} tokens"
        )

    # -- requests ---------------------------------------------------------------------------------------------------
    def encode(self, messages: list[dict[str, str]], begins: bool = True) -> list[int]:
        """Return the tokens of the system prompt and a conversation; `begins` adds the start of an answer."""
        if self.system and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.tokenizer.chat_template is None:
            text = "".join(f"{message['content']}\n" for message in messages)
        else:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def submit(self, ids: list[int], max_tokens: int, temperature: float, send: Callable[[int | None], Any]) -> Request:
        """Add a request. Raise OutOfMemoryError if there is no memory for it now, ValueError if it can never run."""
        given = f"a prompt of {len(ids)} tokens with max_tokens={max_tokens}"
        check(bool(ids) and max_tokens >= 1, given, "at least 1 of each")
        check(len(ids) + max_tokens <= self.context, given, f"{self.context} tokens in all, the model's context")
        begins = len(ids) > len(self.prefix) and ids[: len(self.prefix)] == self.prefix
        shared = len(self.prefix) if begins else 0
        if shared:
            caches = copy.deepcopy(self.prefix_caches)  # a copy shares the storage until the request first appends
            for cache in caches if self.shares else ():
                cache.fork(1)  # what is stored becomes a prefix, which no request copies
        else:
            caches = [KVCache(dtype=self.dtype) for _ in range(self.layers)]
        rows = len(ids) + max_tokens - (0 if caches[0].prefix is None else shared)
        nbytes = int((rows + max(min(rows, 256), rows // 4)) * self.bytes_per_token)  # storage grows before it is full
        given += f" may take {nbytes / 1e6:.1f} MB of keys and values"
        limit = self.memory - sum(cache.nbytes for cache in self.prefix_caches)
        check(nbytes <= limit, given, f"{limit / 1e6:.1f} MB; a larger --memory of the server raises it")
        with self.lock:
            if self.reserved + nbytes > self.memory:
                used = f"{self.reserved / 1e6:.1f} of {self.memory / 1e6:.1f} MB are reserved"
                raise OutOfMemoryError(f"{given}; {used}; send it again later")
            self.reserved += nbytes
        request = Request(list(ids), max_tokens, temperature, caches, nbytes, send, computed=shared, shared=shared)
        self.waiting.put(request)
        return request

    def run(self) -> None:
        """Repeat without end: admit requests, run the model once for all of them, send the new tokens."""
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
            with contextlib.suppress(Exception):  # whoever reads the tokens may have ended
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
                try:
                    self.append_token(request, scores)
                except Exception:  # a faulty request ends alone
                    traceback.print_exc()
                    request.cancelled, request.reason = True, "error"

    def append_token(self, request: Request, scores: Any) -> None:
        """Choose the next token, and send it unless it ends the answer."""
        if request.temperature > 0:
            # float64, and a largest score of 0, so that no temperature above 0 makes a score of NaN
            shifted = (scores - scores.max()).double() / request.temperature
            token = int(torch.multinomial(torch.softmax(shifted, -1), 1))
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
