"""The group "models": whole models of transformers with Sightline's attention, beside the same models with torch's.

Three copies of a model are called in turn: one with `attn_implementation="sightline"`, one with "sdpa", and one that
`watch` records with see=[entropy()]. For padded batches of the encoder, a fourth copy skips padding (`unpadded`). The
encoder is a trained one if its package is installed, else one of the same configuration with random weights. The
decoder has random weights. Nothing is downloaded. Tokens are random, since the time does not depend on them. Every call
gets new tensors, with other tokens than the call before.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from sightline.arrays.operations import to_numpy
from sightline.cli.head_patterns import encoder_folder
from sightline.reference.accuracy import budget_used
from sightline.statistics import entropy

from .cases import SEED, Case, CaseGroup, Contender, TimedCall

Arrays = dict[str, Any]  # NumPy arrays by name; the last axis is a row, whose errors are compared with the row's size
Batch = dict[str, Any]  # the arguments of a model, by name

POOL_SIZE = 4  # number of batches that the calls of a contender use in rotation
SMALL_LENGTH, SMALL_NEW_TOKENS = 8, 3  # limits of the lengths in a small version
TINY_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


# -- the models -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def make_encoder(is_small: bool) -> Any:
    """Return all-MiniLM-L6-v2, or a BERT model of its configuration with random weights; a tiny model if `is_small`."""
    import torch
    import transformers

    folder = encoder_folder()
    if folder is not None and not is_small:
        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = transformers.BertConfig(**(TINY_SIZES if is_small else sizes))
    return _draw_weights(transformers.BertModel, config)


@lru_cache(maxsize=2)
def make_decoder(is_small: bool) -> Any:
    """Return a small Llama model with random weights; a tiny one if `is_small`."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    tokens = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**(TINY_SIZES if is_small else sizes), num_key_value_heads=2, **tokens)
    return _draw_weights(transformers.LlamaForCausalLM, config)


def _draw_weights(model: Any, config: Any) -> Any:
    """Return a model of this class and configuration, with the same random weights in every run."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return model(config).eval()


def copy_with_attention(model: Any, implementation: str) -> Any:
    """Return a copy of the model with one of transformers' attention implementations, or with "sightline"."""
    import_module("sightline.transformers")  # registers "sightline"
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(implementation)
    return copied


# -- the contenders -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelContender(Contender):
    """A model with one of transformers' attention implementations, which may be recorded by `watch` or unpadded."""

    name: str
    label: str
    attention: str
    is_watched: bool = False
    is_unpadded: bool = False
    is_peer: bool = False
    packages: tuple[str, ...] = ("torch", "transformers")
    pip: str = '"sightline-attention[transformers]"'

    def prepare(self, case: ModelCase, inputs: ModelInputs, threads: int) -> TimedCall:
        model = copy_with_attention(inputs.model, self.attention)
        copied = CopiedModel(case, model, inputs.batches, self)
        return TimedCall(copied.call, copied.compute, copied.next, threads, copied.close)


CONTENDERS = (
    ModelContender("sightline", "Sightline", "sightline"),
    ModelContender("watched", "watched", "sightline", is_watched=True),
    ModelContender("sdpa", "sdpa", "sdpa", is_peer=True),
)
WITH_UNPADDED = (*CONTENDERS, ModelContender("unpadded", "unpadded", "sightline", is_unpadded=True))


class CopiedModel:
    """A copy of a model that is called on batches in rotation, recorded or unpadded as the contender says."""

    def __init__(self, case: ModelCase, model: Any, batches: list[Batch], contender: ModelContender) -> None:
        self.case, self.model, self.batches, self.position = case, model, batches, 0
        self.call, self.exit_stack, self.seen = case.make_call(model), ExitStack(), None
        if contender.is_unpadded:
            self.exit_stack.enter_context(import_module("sightline.transformers").unpadded(model))
        if contender.is_watched:
            watch = import_module("sightline").watch
            self.seen = self.exit_stack.enter_context(watch(model, see=[entropy()]))
        self.close = self.exit_stack.close

    def next(self) -> Batch:
        """Return the next batch, as new tensors, and empty the recording."""
        if self.seen is not None:
            self.seen.calls.clear()
        self.position = (self.position + 1) % len(self.batches)
        return {name: tensor.clone() for name, tensor in self.batches[self.position].items()}

    def compute(self, _: Any = None) -> Arrays:
        """Return the arrays that are checked, for the first batch."""
        if self.seen is not None:
            self.seen.calls.clear()
        found = self.case.compute(self.model, self.batches[0])
        return found if self.seen is None else found | self.case.select_recorded(self.seen, self.batches[0])


class ModelInputs:
    """A model and its batches. `references` computes true results for the first batch."""

    def __init__(self, case: ModelCase, batches: int = POOL_SIZE) -> None:
        self.case, self.model = case, case.make_model()
        self.batches = [case.make_batch(index, self.model.config.vocab_size) for index in range(batches)]

    def references(self, found: Arrays) -> tuple[Arrays, Arrays]:
        """Return two dicts of arrays to compare with a contender's arrays `found`: the true arrays, and rough arrays.

        The true arrays are computed in float64 by transformers' model, the rough ones in float32 by its eager model.
        """
        exact = copy_with_attention(self.model, self.case.exact_attention).double()
        models = exact, copy_with_attention(self.model, "eager")
        truth, rough = (self.case.compute_reference(each, self.batches[0], found) for each in models)
        return truth, rough


# -- the cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCase(Case):
    """One use of a model on a batch of texts.

    Parameters
    ----------
    name : name in tables
    lengths : the number of tokens of each text; shorter texts are padded
    is_small : True for tiny models
    """

    name: str
    lengths: tuple[int, ...]
    is_small: bool = False
    pads_left: ClassVar[bool] = False
    contenders: tuple[Contender | str, ...] = CONTENDERS
    exact_attention: ClassVar[str] = "eager"  # the attention implementation that computes the true results in float64

    def make_model(self) -> Any:
        """Return the model, by default the decoder. Contenders use copies of the model."""
        return make_decoder(self.is_small)

    @abstractmethod
    def make_call(self, model: Any) -> Callable[[Batch], Any]:
        """Return the function of a batch that is timed."""

    @abstractmethod
    def compute(self, model: Any, batch: Batch) -> Arrays:
        """Return the arrays that are checked, as the model computes them."""

    def compute_reference(self, model: Any, batch: Batch, found: Arrays) -> Arrays:
        """Return what `model`, one of transformers' own, computes to compare with a contender's arrays `found`."""
        return self.compute(model, batch)

    def select_recorded(self, seen: Any, batch: Batch) -> Arrays:
        """Return the arrays of a recording that are checked; by default none."""
        return {}

    def small(self) -> ModelCase:
        unequal = len(set(self.lengths)) > 1
        lengths = tuple(min(n, SMALL_LENGTH - index * unequal) for index, n in enumerate(self.lengths[:4]))
        return replace(self, lengths=lengths, is_small=True)

    def make_inputs(self) -> ModelInputs:
        return ModelInputs(self)

    def share_of_budget(self, prepared: TimedCall, inputs: ModelInputs) -> float:
        """Return the largest share of the rounding-error budget that the results for the first batch use.

        The true results are those of transformers' model in float64. Its eager model's error sets the budget.
        """
        found = prepared.results(None)
        truth, rough = inputs.references(found)
        return max(budget_used(found[name], truth[name], rough[name]) for name in truth if name in found)

    def make_batch(self, index: int, vocabulary: int) -> Batch:
        """Return a batch of random tokens, with the lengths in another order for each index."""
        import torch

        rng = np.random.default_rng([SEED, index])
        lengths = rng.permutation(self.lengths)
        positions = np.arange(lengths.max())
        is_token = (positions[::-1] if self.pads_left else positions) < lengths[:, None]
        tokens = np.where(is_token, rng.integers(3, vocabulary, is_token.shape), 0)
        return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(is_token.astype(np.int64))}


class EncoderCase(ModelCase):
    """A forward pass of an encoder, whose hidden states are checked."""

    def make_model(self) -> Any:
        return make_encoder(self.is_small)

    def make_call(self, model: Any) -> Callable[[Batch], Any]:
        import torch

        def call(batch: Batch) -> Any:
            with torch.no_grad():
                return model(**batch)

        return call

    def compute(self, model: Any, batch: Batch) -> Arrays:
        """Return the states of all tokens that are not padding, and for an eager model the entropies of its weights."""
        is_token = to_numpy(batch["attention_mask"]) > 0
        is_eager = model.config._attn_implementation == "eager"
        output = self.make_call(model)(batch | {"output_attentions": is_eager})
        arrays = {"states": to_numpy(output.last_hidden_state)[is_token]}
        if is_eager:
            weights = np.stack([to_numpy(layer) for layer in output.attentions])
            entropies = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
            arrays["entropy"] = _of_tokens(entropies, is_token)
        return arrays

    def select_recorded(self, seen: Any, batch: Batch) -> Arrays:
        entropies = np.stack([to_numpy(of_layer) for of_layer in seen["entropy"]])
        return {"entropy": _of_tokens(entropies, to_numpy(batch["attention_mask"]) > 0)}


def _of_tokens(entropies: Any, is_token: Any) -> Any:
    """Return entropies (layers, B, H, n) as (tokens, layers, H), without the entropies of padding tokens."""
    return entropies.transpose(1, 3, 0, 2)[is_token]


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """Greedy generation by the decoder, with a cache of keys and values. Prompts are padded on the left."""

    new_tokens: int = 32
    pads_left: ClassVar[bool] = True
    exact_attention: ClassVar[str] = "sdpa"  # "eager" in float64 gives NaN for a query that sees no key

    def small(self) -> ModelCase:
        return replace(super().small(), new_tokens=SMALL_NEW_TOKENS)  # type: ignore[call-arg]

    def make_call(self, model: Any) -> Callable[[Batch], Any]:
        def call(batch: Batch) -> Any:
            return model.generate(**batch, max_new_tokens=self.new_tokens, do_sample=False)

        return call

    def compute(self, model: Any, batch: Batch) -> Arrays:
        """Return the logits of all steps, and the tokens of prompts and answers."""
        output = self.make_call(model)(batch | {"output_logits": True, "return_dict_in_generate": True})
        return {"logits": np.stack([to_numpy(step) for step in output.logits], 1), "tokens": to_numpy(output.sequences)}

    def compute_reference(self, model: Any, batch: Batch, found: Arrays) -> Arrays:
        """Return the logits of one forward pass on the contender's tokens."""
        import torch

        tokens = torch.from_numpy(found["tokens"])[:, :-1]
        new = torch.ones(len(tokens), self.new_tokens - 1, dtype=torch.int64)
        mask = torch.cat([batch["attention_mask"], new], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        return {"logits": to_numpy(logits[:, -self.new_tokens :])}


class TrainingCase(ModelCase):
    """One training step of the decoder: forward pass, backward pass and AdamW."""

    def make_call(self, model: Any) -> Callable[[Batch], Any]:
        import torch

        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def call(batch: Batch) -> Any:
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return call

    def compute(self, model: Any, batch: Batch) -> Arrays:
        """Return the loss, and the gradient of each parameter as one row, for the parameters before any step."""
        import torch

        model.load_state_dict(self.make_model().state_dict())
        parameters = dict(model.named_parameters())
        loss = model(**batch, labels=batch["input_ids"]).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        rows = {name: to_numpy(gradient).reshape(-1) for name, gradient in zip(parameters, gradients, strict=True)}
        return rows | {"loss": to_numpy(loss.detach()).reshape(1)}


MIXED_LENGTHS = tuple(8 + 120 * k // 31 for k in range(32))  # from 8 to 128 tokens


def _group(name: str, description: str, *cases: ModelCase) -> CaseGroup:
    return CaseGroup(
        name=f"models {name}",
        group="models",
        description=description,
        cases=cases,
        peer="sdpa",
    )


MODELS = (
    _group(
        "encoder",
        ("all-MiniLM-L6-v2" if encoder_folder() else "random weights") + ", 6 layers, 12 heads on 384",
        EncoderCase("1 short sentence", (12,)),
        EncoderCase("4 short, padded", (6, 8, 9, 12), contenders=WITH_UNPADDED),
        EncoderCase("32 mixed, padded", MIXED_LENGTHS, contenders=WITH_UNPADDED),
        EncoderCase("1 × 512 tokens", (512,)),
    ),
    _group(
        "decoder",
        "Llama, random weights, 4 layers, 8 heads on 256",
        GenerationCase("generate 32 after 512", (512,)),
        GenerationCase("generate 32, 4 prompts", (20, 35, 50, 64)),
        TrainingCase("train 4 × 128", (128,) * 4),
    ),
)
