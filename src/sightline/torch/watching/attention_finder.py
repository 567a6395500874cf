"""The finder of attention calls: a mode of torch that sees the calls of a thread, and the readers of their arguments.

torch passes every call of its functions to its modes first, however the caller has imported the function. The finder
then computes attention by `sightline.attention`, with the statistics of the watches as further results.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from math import log
from threading import Lock
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function

from ...api import functions
from ...api.functions import attend
from ...call.problem import Options
from ...errors import ParameterError
from ...formula.from_function import to_formula
from ...formula.torch_masks import block_formula
from ...kv_cache import KVCache
from ...statistics import lse, max_score
from ..functional import convert_arguments, scaled_dot_product_attention
from ..interception import has_modes, in_eager_code, is_transformed
from ..layer_calls import LayerCall, attend_for_layer
from ..nested import is_nested
from ..operator import autocast_disabled
from ..replacement import replacing_attend, torch_attention  # type: ignore[attr-defined]
from .call_recorder import Recorder, Watcher
from .handwritten import WeightsMark, find_handwritten, forget_tensors
from .running_modules import nested_error, without_hand_over

OPERATOR = torch.ops.aten.scaled_dot_product_attention  # exported programs call it
MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)
SCALED_DOT_PRODUCT = inspect.signature(scaled_dot_product_attention)


class Finder(TorchFunctionMode):
    """The mode of torch that sees the calls of attention, for all watches."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: tuple[Watcher, ...] = ()
        self.keeps_scores = False  # for a watch that records attention written by hand
        self.lock = Lock()

    @partial(
        in_eager_code, otherwise=lambda _, function, types, inputs=(), options=None: function(*inputs, **options or {})
    )
    def __torch_function__(self, function: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is Tensor.backward:  # checkpointed functions run again in it
            with self:
                return _backward(*inputs, **options)
        read = READERS.get(function)
        if read is not None:
            recorders = self.recorders()
            return read(function, recorders, *inputs, **options) if recorders else function(*inputs, **options)
        result = function(*inputs, **options)
        weights = find_handwritten(function, inputs, options, result, self.keeps_scores)
        if weights is not None:
            self.record_handwritten(weights)
        return result

    def record_handwritten(self, weights: WeightsMark) -> None:
        """Record attention written by hand for the watches that ask for it, and note it for the others."""
        asked = () if weights.scores is None else [watcher for watcher in self.watchers if watcher.records_handwritten]
        for watcher in self.watchers:
            if watcher in asked:
                watcher.forget_handwritten(weights.place, weights.softmax)
            else:
                watcher.note_handwritten(weights.place, weights.softmax, weights.reason)
        recorders = self.recorders(asked)
        if recorders:
            _compute_from_scores(recorders, weights)

    def recorders(self, watchers: Iterable[Watcher] | None = None) -> list[Recorder]:
        """Return a recorder for each of the watchers, by default all, that records the module that runs here."""
        found = [watcher.recorder() for watcher in (self.watchers if watchers is None else watchers)]
        return [recorder for recorder in found if recorder is not None]

    @contextmanager
    def serving(self, watcher: Watcher) -> Any:
        """While the context lasts, record calls for the watcher, and follow which of its modules run."""
        with self.lock:
            self._serve((*self.watchers, watcher))
        try:
            with watcher.modules.follow(self):
                yield
        finally:
            with self.lock:
                self._serve(tuple(other for other in self.watchers if other is not watcher))

    def _serve(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers, self.keeps_scores = watchers, any(watcher.records_handwritten for watcher in watchers)
        functions.OBSERVERS[:] = [_observe] if watchers else []
        if not watchers:
            forget_tensors()


FINDER = Finder()


def is_watched() -> bool:
    """True if a watch records the attention of the module that runs in this thread."""
    return bool(FINDER.watchers and has_modes() and FINDER.recorders())


def _backward(
    tensor: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Do what `Tensor.backward` does, but without passing the call to torch's modes."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _observe(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Return what the modes of the thread return for a call of `attend`; NotImplemented if there are none."""
    return handle_torch_function(attend, (), query, key, value, options) if has_modes() else NotImplemented


def _compute(
    recorders: Sequence[Recorder],
    call: LayerCall,
    operands: tuple[Any, Any, Any],
    options: Options,
    compute: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return (output, the results of the caller's statistics) of a call of `attend`, and record the call.

    `operands` are query, key and value. `compute` returns the output of a call with dropout, with the same weights
    dropped as without a watch.
    """
    (query, key, _), own = operands, options.see or ()
    if is_nested(query):
        raise nested_error()
    if is_transformed():  # the results would be tensors that end with the transform
        given = "attention in a transform of torch.func or in forward-mode differentiation, in a watch"
        cure = "watch a call of the model without vmap, grad, jvp or dual numbers"
        raise ParameterError(given, "calls of the model itself, and backward passes", cure)
    of_recorders = [recorder.requested() for recorder in recorders]
    requested = [*own, *(statistic for statistics in of_recorders for statistic in statistics)]
    with without_hand_over():  # of the kernels' threads
        output, results = attend(*operands, options.replace(see=requested))
    m = int(max(key.lengths)) if isinstance(key, KVCache) else key.shape[-2]
    start = len(own)
    for recorder, statistics in zip(recorders, of_recorders, strict=True):
        stop = start + len(statistics)
        recorder.record(results[start:stop], output, call, query.shape[-2], m)
        start = stop
    return output if compute is None else compute(), results[: len(own)]


def _compute_from_scores(recorders: Sequence[Recorder], weights: WeightsMark) -> None:
    """Record attention whose scores S the model has computed: query and key are 0, and S is added to their scores."""
    scores: Any = weights.scores
    scores = scores.reshape(-1, *scores.shape[-3:]) if scores.ndim > 3 else scores.reshape(-1, 1, *scores.shape[-2:])
    zero = torch.zeros((), dtype=weights.dtype, device=scores.device)
    query, key = (zero.expand(*scores.shape[:2], length, 1) for length in scores.shape[2:])
    with autocast_disabled(scores):
        _compute(recorders, LayerCall(), (query, key, key), Options(score=scores, scale=1.0))


def _read_own(function: Any, recorders: list[Recorder], query: Any, key: Any, value: Any, options: Options) -> Any:
    """Record a call of `sightline.attention` by a model, and return its result."""
    if not isinstance(query, Tensor):
        return function(query, key, value, options)
    output, results = _compute(recorders, LayerCall(), (query, key, value), options)
    return output if options.see is None else (output, results)


def _read_layer(
    _: Any, recorders: list[Recorder], query: Any, key: Any, value: Any, call: LayerCall, options: Options
) -> tuple[Tensor, tuple[Any, ...]]:
    """Record a call by a layer of this library, or by a transformers model with `attn_implementation="sightline"`."""
    return _compute(recorders, call, (query, key, value), options)


def _read_torch(
    function: Any, recorders: list[Recorder], *inputs: Any, call: LayerCall | None = None, **options: Any
) -> Tensor:
    """Record a call of torch's `scaled_dot_product_attention`, or of the operator that exported programs call."""
    bound = SCALED_DOT_PRODUCT.bind(*inputs, **options)
    bound.apply_defaults()
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = bound.args
    operands, read, without_batch = convert_arguments(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    compute = partial(function, *inputs, **options) if dropout_p > 0 else None
    call = call or (LayerCall("self", 0) if is_causal else LayerCall())
    output, _ = _compute(recorders, call, operands, read, compute)
    return output[0] if without_batch and compute is None else output


def _read_multi_head(function: Any, recorders: list[Recorder], *inputs: Any, **options: Any) -> Any:
    """Record a call of `multi_head_attention_forward`. If the caller asks for weights, torch computes the results.

    With weights, torch applies `attn_mask` and ignores `is_causal`. Without weights, torch applies `is_causal` alone.
    """
    arguments = MULTI_HEAD.bind(*inputs, **options).arguments
    needs_weights = arguments.get("need_weights", True)
    if needs_weights:
        arguments |= {"need_weights": False, "training": False}
        arguments["is_causal"] = arguments.get("is_causal", False) and arguments.get("attn_mask") is None
    call = LayerCall("self" if arguments["query"] is arguments["key"] else "cross", 0)
    read = partial(_read_torch, torch_attention, recorders, call=call)
    # the modes and classes of tensors that `function` would hand itself over to see the operators inside it
    scope = {**function.__globals__, torch_attention.__name__: read, "has_torch_function": lambda _: False}
    inner = FunctionType(function.__code__, scope, argdefs=function.__defaults__)
    answer = inner(**arguments)
    return function(*inputs, **options) if needs_weights else answer


def _read_flex(
    function: Any,
    recorders: list[Recorder],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """Record a call of flex_attention's operator. Return output, lse and, in later versions, maxima, in base 2."""
    lists = dict(
        zip(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), block_mask[2:6], strict=True)
    )
    blocks = SimpleNamespace(seq_lengths=block_mask[:2], BLOCK_SIZE=block_mask[-3:-1], **lists)
    mask = block_formula(blocks, to_formula(block_mask[-1], "mask", "b h i j"))
    options = Options(mask, to_formula(score_mod, "score", "s b h i j"), [lse(), max_score()], scale)
    output, results = _compute(recorders, LayerCall(), (query, key, value), options)
    answer = output, results[0] / log(2), results[1].score / log(2)
    return answer if hasattr(sys.modules["torch.nn.attention.flex_attention"], "AuxRequest") else answer[:2]


READERS: dict[Any, Callable[..., Any]] = {
    attend: _read_own,
    attend_for_layer: _read_layer,
    torch_attention: _read_torch,
    replacing_attend: _read_torch,
    OPERATOR: _read_torch,
    OPERATOR.default: _read_torch,
    functional.multi_head_attention_forward: _read_multi_head,
    flex_operator: _read_flex,
}
