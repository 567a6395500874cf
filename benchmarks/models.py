"""Whole models of transformers with Sightline's attention, beside the same models with torch's.

Copies of a model are called in turn: one with `attn_implementation="sightline"`, one with "sdpa", one that `watch`
records with see=[entropy()], and for padded batches of the encoder one that skips padding (`unpadded`). The encoder is
a trained one if its package is installed, else one of the same configuration with random weights. The decoder has
random weights. Nothing is downloaded. Tokens are random, since the time does not depend on them. Every call gets new
tensors, with other tokens than the call before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import cycle
from typing import Any, ClassVar

import numpy as np

from sightline.arrays.operations import to_numpy
from sightline.cli.head_patterns import encoder_folder
from sightline.reference.accuracy import budget_used
from sightline.statistics import entropy

from .core import SEED, Call, Contender, Problem, Results

Batch = dict[str, Any]  # the arguments of a model, by name

POOL_SIZE = 4  # number of batches that the calls of a contender use in rotation
NEW_TOKENS = 32  # tokens that a generation adds
SMALL_LENGTH = 8  # largest number of tokens of a text in a small version


@cache
def make_encoder() -> Any:
    """Return all-MiniLM-L6-v2, or a BERT model of its configuration with random weights."""
    import torch
    import transformers

    folder = encoder_folder()
    if folder is not None:
        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    torch.manual_seed(SEED)
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


@cache
def make_decoder() -> Any:
    """Return a small Llama model with random weights."""
    import torch
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    tokens = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(SEED)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **tokens)).eval()


def copy_with_attention(model: Any, implementation: str) -> Any:
    """Return a copy of the model with one of transformers' attention implementations, or with "sightline"."""
    import_module("sightline.transformers")  # registers "sightline"
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(implementation)
    return copied


@dataclass(frozen=True, kw_only=True)
class ModelCall(Problem):
    """One use of a model on a batch of texts with these numbers of tokens; shorter texts are padded."""

    lengths: tuple[int, ...]
    pads_left: ClassVar[bool] = False

    def make_model(self) -> Any:
        """Return the model, of which contenders use copies."""
        return make_decoder()

    def call(self, model: Any) -> Callable[[Batch], Any]:
        """Return the function of a batch that is timed."""
        raise NotImplementedError

    def compute(self, model: Any, batch: Batch) -> Results:
        """Return the arrays that are checked. The last axis is a row."""
        raise NotImplementedError

    def small(self) -> ModelCall:
        unequal = len(set(self.lengths)) > 1
        lengths = tuple(min(n, SMALL_LENGTH - index * unequal) for index, n in enumerate(self.lengths[:4]))
        return replace(self, lengths=lengths)

    def inputs(self) -> list[Batch]:
        vocabulary = self.make_model().config.vocab_size
        return [self.make_batch(index, vocabulary) for index in range(POOL_SIZE)]

    def make_batch(self, index: int, vocabulary: int) -> Batch:
        """Return a batch of random tokens, with the lengths in another order for each index."""
        import torch

        rng = np.random.default_rng([SEED, index])
        lengths = rng.permutation(self.lengths)
        positions = np.arange(lengths.max())
        is_token = (positions[::-1] if self.pads_left else positions) < lengths[:, None]
        tokens = np.where(is_token, rng.integers(3, vocabulary, is_token.shape), 0)
        return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(is_token.astype(np.int64))}

    def error(self, call: Call, inputs: list[Batch]) -> float:
        """Return the share of the budget for the first batch.

        The true results are those of transformers' model in float64. The error of its eager model in float32 sets the
        budget.
        """
        found = call.results(None)
        exact = copy_with_attention(self.make_model(), "sdpa").double()
        models = exact, copy_with_attention(self.make_model(), "eager")
        truth, rough = (self.compute(each, inputs[0]) for each in models)
        return max(budget_used(found[name], truth[name], rough[name]) for name in truth)


class Encoding(ModelCall):
    """A forward pass of the encoder, whose hidden states are checked at all tokens that are not padding."""

    def make_model(self) -> Any:
        return make_encoder()

    def call(self, model: Any) -> Callable[[Batch], Any]:
        import torch

        decorated: Callable[[Batch], Any] = torch.no_grad()(lambda batch: model(**batch))
        return decorated

    def compute(self, model: Any, batch: Batch) -> Results:
        states = self.call(model)(batch).last_hidden_state
        return {"states": to_numpy(states)[to_numpy(batch["attention_mask"]) > 0]}


class Generation(ModelCall):
    """Greedy generation by the decoder, with a cache of keys and values. Prompts are padded on the left."""

    pads_left: ClassVar[bool] = True

    def call(self, model: Any) -> Callable[[Batch], Any]:
        return lambda batch: model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)

    def compute(self, model: Any, batch: Batch) -> Results:
        """Return the logits of every new token. They are comparable as long as all models choose the same tokens."""
        output = self.call(model)(batch | {"output_logits": True, "return_dict_in_generate": True})
        return {"logits": np.stack([to_numpy(step) for step in output.logits], 1)}


class Training(ModelCall):
    """One training step of the decoder: forward pass, backward pass and AdamW."""

    def call(self, model: Any) -> Callable[[Batch], Any]:
        import torch

        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step(batch: Batch) -> Any:
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def compute(self, model: Any, batch: Batch) -> Results:
        """Return the loss, and the gradient of each parameter as one row, for the parameters before any step."""
        import torch

        model.load_state_dict(self.make_model().state_dict())
        parameters = dict(model.named_parameters())
        loss = model(**batch, labels=batch["input_ids"]).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        rows = {name: to_numpy(gradient).reshape(-1) for name, gradient in zip(parameters, gradients, strict=True)}
        return rows | {"loss": to_numpy(loss.detach()).reshape(1)}


def prepare_model(problem: ModelCall, batches: list[Batch], threads: int, implementation: str, context: str) -> Call:
    """Prepare a copy of the model. The context "watch" or "unpadded" is entered once, and left at the end."""
    model, stack, seen = copy_with_attention(problem.make_model(), implementation), ExitStack(), None
    call, rotation = problem.call(model), cycle(batches)
    if context == "unpadded":
        stack.enter_context(import_module("sightline.transformers").unpadded(model))
    if context == "watch":
        seen = stack.enter_context(import_module("sightline").watch(model, see=[entropy()]))

    def next_batch() -> Batch:
        """Return the next batch, as new tensors, and empty the recording."""
        if seen is not None:
            seen.calls.clear()
        return {name: tensor.clone() for name, tensor in next(rotation).items()}

    return Call(call, lambda _: problem.compute(model, batches[0]), next_batch, stack.close)


def _contender(name: str, implementation: str = "sightline", context: str = "") -> Contender:
    prepare = partial(prepare_model, implementation=implementation, context=context)
    return Contender(name, prepare, is_ours=implementation == "sightline", needs=("torch", "transformers"))


CONTENDERS = (_contender("Sightline"), _contender("watched", context="watch"), _contender("sdpa", "sdpa"))
WITH_UNPADDED = (*CONTENDERS, _contender("unpadded", context="unpadded"))
MIXED_LENGTHS = tuple(8 + 120 * k // 31 for k in range(32))  # from 8 to 128 tokens
OF_ENCODER = ("all-MiniLM-L6-v2" if encoder_folder() else "random weights") + ", 6 layers, 12 heads on 384"
OF_DECODER = "Llama, random weights, 4 layers, 8 heads on 256"
ENCODER: dict[str, Any] = {"table": "models encoder", "group": "models", "about": OF_ENCODER}
DECODER: dict[str, Any] = {"table": "models decoder", "group": "models", "about": OF_DECODER, "contenders": CONTENDERS}
MODELS: tuple[ModelCall, ...] = (
    Encoding(name="1 short sentence", lengths=(12,), contenders=CONTENDERS, **ENCODER),
    Encoding(name="4 short, padded", lengths=(6, 8, 9, 12), contenders=WITH_UNPADDED, **ENCODER),
    Encoding(name="32 mixed, padded", lengths=MIXED_LENGTHS, contenders=WITH_UNPADDED, **ENCODER),
    Encoding(name="1 × 512 tokens", lengths=(512,), contenders=CONTENDERS, **ENCODER),
    Generation(name="generate 32 after 512", lengths=(512,), **DECODER),
    Generation(name="generate 32, 4 prompts", lengths=(20, 35, 50, 64), **DECODER),
    Training(name="train 4 × 128", lengths=(128,) * 4, **DECODER),
)
