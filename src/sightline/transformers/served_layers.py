"""Attention layers of transformers that no fused kernel could serve, in place of their own `forward`.

These layers write attention by hand, because they add a bias that depends on the query. Here the layer's projections
make query, key and value. The bias is two lookups in tables of n · buckets numbers for each head, not n × m numbers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..formula.expression import SYMBOLS, Expression, apply
from ..formula.library import relative_bias
from ..formula.tables import Table
from ..torch.layer_calls import wrapping
from .compatibility import NAME, attention_function, bidirectional_mask_function
from .masks_and_biases import PositionBias, Unpadding, sightline_mask

b, h, i, j, s = (SYMBOLS[name] for name in "bhijs")


def is_served(kind: type) -> bool:
    """True if layers of this class are computed by this library."""
    return _name(kind) in LAYERS


@contextmanager
def serving_layers(model: nn.Module) -> Iterator[None]:
    """Run `REPLACED_METHODS` in place of the model's own methods in the context; compiled code runs its own."""
    with ExitStack() as exit_stack:
        for module in model.modules():
            for method, compute in REPLACED_METHODS.get(_name(type(module)), {}).items():
                wrapper = partial(_call, module, compute)
                exit_stack.enter_context(wrapping(module, method, wrapper, in_compiled_code=False))
        yield


def _name(kind: type) -> str:
    """Return the name of a class of transformers' models, such as "mpnet.MPNetSelfAttention"."""
    return f"{kind.__module__.removeprefix('transformers.models.').partition('.')[0]}.{kind.__name__}"


def _call(module: nn.Module, compute: Callable[..., Any], own: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return `compute(module, own method, **all arguments of a call of that method)`.

    The method itself runs if heads are masked, as transformers 4 can.
    """
    given = inspect.signature(own).bind(*inputs, **options)
    given.apply_defaults()
    if given.arguments.get("head_mask") is not None:
        return own(*inputs, **options)
    return compute(module, own, **given.arguments)


def _attend(layer: nn.Module, arrays: Any, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output (B, n, H · d_v), and weights or None, of the attention function "sightline" of transformers."""
    output, weights = attention_function(NAME)(layer, *arrays, mask, is_causal=False, **options)
    return output.flatten(2), weights


def _read(products: Tensor, row: Expression, column: Expression) -> Expression:
    """Return entries as a bias. Without −∞ among them, which would hide keys, no call searches for hidden tiles."""
    return apply("maximum", Table(products)[b, h, row, column], torch.finfo(products.dtype).min)


def _split(array: Tensor, heads: int) -> Tensor:
    return array.view(*array.shape[:-1], heads, -1).transpose(1, 2)


def _attend_disentangled(layer: Any, own: Any, hidden_states: Tensor, attention_mask: Any, **options: Any) -> Any:
    """Add q_i · r_k[δ(i − j)] and k_j · r_q[δ(i − j)] to q_i · k_j, for the buckets δ of distances.

    Source: He et al., "DeBERTa: Decoding-enhanced BERT with disentangled attention", 2021, equation 4.
    """
    if options["relative_pos"] is not None:  # the caller's own distances
        all_visible = hidden_states.new_ones(1, 1, 1, 1)
        return own(hidden_states, all_visible if attention_mask is None else attention_mask, **options)
    queries = hidden_states if options["query_states"] is None else options["query_states"]
    sources = queries, hidden_states, hidden_states
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    arrays = [_split(project(x), layer.num_attention_heads) for project, x in zip(projections, sources, strict=True)]
    kinds = [kind for kind in ("c2p", "p2c") if kind in layer.pos_att_type]
    scale = (arrays[0].shape[-1] * (1 + len(kinds))) ** -0.5
    embeddings: Any = layer.pos_dropout(options["rel_embeddings"]) if layer.relative_attention else None

    def make_score(query: Tensor, key: Tensor, unpadding: Unpadding | None) -> Expression:
        length = key.shape[-2] if unpadding is None else unpadding.n
        distance = i - j if unpadding is None else (i - j).rewrite(unpadding.symbols)
        span, distances = layer.pos_ebd_size, torch.arange(1 - length, length, device=key.device)
        if layer.position_buckets > 0:
            make_buckets = sys.modules[type(layer).__module__].make_log_bucket_position
            distances = make_buckets(distances, layer.position_buckets, layer.max_relative_positions).long()
        buckets = (distances + span).clamp(0, 2 * span - 1)
        used = embeddings[int(buckets[0]) : int(buckets[-1]) + 1]
        bucket = Table(buckets - buckets[0])[distance + (length - 1)]
        score: Expression = s
        for kind, array, place, name in (("c2p", query, i, "pos_key_proj"), ("p2c", key, j, "pos_query_proj")):
            if kind in kinds:
                project = getattr(layer, name.replace("pos_", "") if layer.share_att_key else name)
                rows = _split(project(used)[None], layer.num_attention_heads)
                score = score + _read(array @ (rows * scale).transpose(-1, -2), place, bucket)
        return score

    options = {"scaling": scale, "dropout": layer.dropout.p, "output_attentions": options["output_attentions"]}
    return _attend(
        layer, arrays, attention_mask, make_score=make_score if layer.relative_attention else None, **options
    )


def _mask_keys(encoder: Any, own: Any, attention_mask: Tensor) -> Any:
    """Return the mask of a batch with padding as a formula."""
    if attention_mask.ndim != 2:
        return own(attention_mask)
    visible = bidirectional_mask_function or (lambda batch, head, query, key: key >= 0)
    (count, length), device = attention_mask.shape, attention_mask.device
    return sightline_mask(count, length, length, 0, 0, visible, attention_mask.bool(), True, device=device)


def _attend_mpnet(layer: Any, own: Any, hidden_states: Tensor, attention_mask: Any, **options: Any) -> Any:
    arrays = [_split(project(hidden_states), layer.num_attention_heads) for project in (layer.q, layer.k, layer.v)]
    passed = {name: options[name] for name in ("position_bias", "output_attentions")}
    output, weights = _attend(layer, arrays, attention_mask, dropout=layer.dropout.p, **passed)
    return (layer.o(output), weights) if passed["output_attentions"] else (layer.o(output),)


def _make_relative_bias(encoder: Any, own: Any, x: Tensor, position_ids: Any, num_buckets: int) -> Any:
    """Return the bias of distances, as T5 has it, as a formula."""
    if position_ids is not None:
        return own(x, position_ids, num_buckets)
    count, length = x.shape[:2]
    distances = torch.arange(1 - length, length, device=x.device)
    table = encoder.relative_attention_bias(encoder.relative_position_bucket(distances, num_buckets=num_buckets)).T
    shape, dense = (count, len(table), length, length), partial(own, x, num_buckets=num_buckets)
    return PositionBias(shape, x.device, table.dtype, formula=relative_bias(table), dense=dense)


def _attend_image(layer: Any, own: Any, output_attentions: Any = None, **named: Tensor) -> Any:
    """Add two biases: products of the query with embeddings of two distances, that in rows and that in columns.

    Source: Li et al., "MViTv2: Improved multiscale vision transformers", 2022, equation 4.
    """
    (states,) = named.values()  # "hidden_state" or "hidden_states"
    count, height, width = states.shape[:3]
    is_sam = hasattr(layer, "get_rel_pos")
    heads = layer.num_attention_heads if is_sam else layer.num_heads
    embed = layer.get_rel_pos if is_sam else sys.modules[type(layer).__module__].get_rel_pos
    arrays = layer.qkv(states).reshape(count, height * width, 3, heads, -1).permute(2, 0, 3, 1, 4)

    def make_score(query: Tensor, key: Tensor, _: Any) -> Expression:
        places = query.reshape(*query.shape[:2], height, width, -1)
        of_row = torch.einsum("bnhwc,hkc->bnhwk", places, embed(height, height, layer.rel_pos_h)).flatten(2, 3)
        of_column = torch.einsum("bnhwc,wkc->bnhwk", places, embed(width, width, layer.rel_pos_w)).flatten(2, 3)
        return s + _read(of_row, i, j // width) + _read(of_column, i, j % width)

    has_bias = hasattr(layer, "rel_pos_h")
    options = {"dropout": getattr(layer, "dropout", 0.0), "output_attentions": bool(output_attentions)}
    output, weights = _attend(layer, arrays, None, make_score=make_score if has_bias else None, **options)
    output = layer.proj(output.reshape(count, height, width, -1))
    return (output, weights) if is_sam or output_attentions else (output,)


SAM = "sam.SamVisionAttention", "sam.SamVisionSdpaAttention"
SAM_HQ = "sam_hq.SamHQVisionAttention", "sam_hq.SamHQVisionSdpaAttention"
REPLACED_METHODS: dict[str, dict[str, Callable[..., Any]]] = {  # by class: what computes in place of its methods
    "deberta_v2.DisentangledSelfAttention": {"forward": _attend_disentangled},
    "mpnet.MPNetSelfAttention": {"forward": _attend_mpnet},
    **{name: {"forward": _attend_image} for name in ("vitdet.VitDetAttention", *SAM, *SAM_HQ)},
    "deberta_v2.DebertaV2Encoder": {
        "get_rel_pos": lambda *_, relative_pos, **__: relative_pos,  # by default no n × n distances
        "get_attention_mask": _mask_keys,
    },
    "mpnet.MPNetEncoder": {"compute_position_bias": _make_relative_bias},
}
LAYERS = [name for name, methods in REPLACED_METHODS.items() if "forward" in methods]
