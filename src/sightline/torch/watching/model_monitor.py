"""`AttentionMonitor`: statistics of the attention of a torch model at chosen steps of its training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn

from ...errors import ParameterError, check_count, context
from ...statistics.monitoring import MONITORED, MonitoredStep, StepSums
from ...statistics.recording import Seen
from ..layer_calls import check_module
from .model_watch import watch

__all__ = ["AttentionMonitor"]


class AttentionMonitor:
    """The largest score, the entropy and the weight on the first key of each head, at every so many steps of training.

    For head h of a layer, over the batch entries b, the queries i and all calls of a step:

        max_score = max S_ij      entropy = mean of −Σⱼ P_ij ln P_ij      first_key = mean of P_i0

    S are the scores and P the weights before dropout. Queries that see no key are in no mean; queries at padding count
    like others. A chosen step runs in a `sightline.watch`: this library computes the attention, exactly, and compiled
    models run uncompiled. All other steps run as without a monitor. A layer under gradient checkpointing runs twice and
    gives the same numbers twice, which changes no maximum and no mean.

    Parameters
    ----------
    model : torch.nn.Module
    every : int, default 100
        The steps 0, every, 2 · every, … are recorded.
    layers : path, pattern or number of a layer, or a list of them, default all
        As in `sightline.watch`.
    log : function (values, number of the step), optional
        A recorded step ends with a call of this function. It gets the dict of `MonitoredStep.summary`. Functions that
        fit: `wandb.log`, `mlflow.log_metrics`, `lambda values, step: print(step, values)`.
    keep : int, default 1,000
        The number of newest steps that `history` keeps.
    over_ranks : bool, default True
        With `torch.distributed`, take maxima and means over all ranks, which must have the same layers and record the
        same steps. False keeps the numbers of each rank.

    Attributes
    ----------
    history : deque of MonitoredStep
        The newest recorded steps. A step takes 32 bytes for each head of each layer.

    Raises
    ------
    ParameterError
        `model` is not a module, `every` or `keep` is not a whole number of at least 1, `log` cannot be called, or the
        number of a step is not a whole number of at least 0. A recorded step raises the errors of `sightline.watch`,
        for example if the model writes its attention by hand.

    Examples
    --------
    >>> import torch, sightline
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> monitor = sightline.AttentionMonitor(model, every=10)
    >>> for number in range(20):
    ...     with monitor.step(number):
    ...         model(torch.randn(4, 5, 8)).sum().backward()
    >>> [step.number for step in monitor.history]
    [0, 10]
    >>> monitor.history[-1].layers["self_attn"].entropy.shape
    (2,)
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        layers: str | int | Sequence[str | int] | None = None,
        log: Callable[[dict[str, float], int], Any] | None = None,
        keep: int = 1_000,
        over_ranks: bool = True,
    ) -> None:
        check_module(model)
        if log is not None and not callable(log):
            allowed = "a function of a dict and the number of the step"
            raise ParameterError(f"log={log!r}", allowed, "log=lambda values, step: ...")
        self.model, self.layers, self.log = model, layers, log
        self.every = check_count("every={!r}", every, 1, "every=100")
        self.over_ranks = over_ranks
        self.history: deque[MonitoredStep] = deque(maxlen=check_count("keep={!r}", keep, 1, "keep=100"))
        self._newest: MonitoredStep | None = None  # of the step that runs or has run last; None if it is not recorded
        self._open = ExitStack()

    @context
    def step(self, number: int, *, joins: bool = False) -> Generator[None]:
        """Record the forward passes of the `with` block if `number` is a multiple of `every`.

        The block must run all forward and backward passes of the step. With gradient accumulation, a step has several.

        Parameters
        ----------
        number : int
            The number of the step, from 0 on; in a resumed training, the number that it goes on with.
        joins : bool, default False
            True if the block is a further part of the newest step of `history`. The numbers of both are then joined.
        """
        self._newest = None
        number = check_count("step({!r})", number, 0, "step(global_step)")
        if number % self.every:
            yield
            return
        sums = StepSums()
        with watch(self.model, MONITORED, layers=self.layers) as seen, ExitStack() as exit_stack:
            # sums replace the results when a forward pass ends, so that several passes need no more memory than one
            hook = self.model.register_forward_hook(lambda *_: _move(seen, sums))
            exit_stack.callback(hook.remove)
            yield
        _move(seen, sums)
        if self.over_ranks and distributed.is_available() and distributed.is_initialized():
            _reduce_over_ranks(sums, seen.layers)
        recorded = sums.finish(number, seen.layers)
        self._newest = self.history.pop().merge(recorded) if joins and self.history else recorded
        self.history.append(self._newest)
        if self.log is not None:
            self.log(self._newest.summary(), number)

    def begin_step(self, number: int, *, joins: bool = False) -> None:
        """Begin a step as `step` does, for programs that call one function before each step and another after it."""
        self.cancel_step()
        self._open.enter_context(self.step(number, joins=joins))

    def end_step(self) -> dict[str, float] | None:
        """End the step that `begin_step` began. Return the numbers for a log, or None if the step is not recorded."""
        self._open.close()
        return None if self._newest is None else self._newest.summary()

    def cancel_step(self) -> None:
        """End the step that `begin_step` began, if there is one, and record nothing."""
        opened, self._open = self._open.pop_all(), ExitStack()
        with suppress(_CancelledError), opened:
            raise _CancelledError


class _CancelledError(Exception):
    """`cancel_step` raises and catches it inside a step, so that the step ends and is not recorded."""


def _move(seen: Seen, sums: StepSums) -> None:
    """Add the results of the recorded calls to the sums, and drop them from the recording."""
    with sums.lock:  # replicas of the model end their forward passes in several threads
        for place, call in enumerate(seen.calls):
            if call.results:
                scores, *others = call.results
                results = [scores._replace(value=scores.value.detach()), *(result.detach() for result in others)]
                sums.add(call.layer, results)
                seen.calls[place] = replace(call, statistics=(), results=())


def _reduce_over_ranks(sums: StepSums, layers: Sequence[str]) -> None:
    """Replace the maxima by those over all ranks, and the totals by their sums over all ranks."""
    for found, how in ((sums.maxima, distributed.ReduceOp.MAX), (sums.totals, distributed.ReduceOp.SUM)):
        flat = torch.cat([found[layer].double().flatten() for layer in layers])
        distributed.all_reduce(flat, how)
        parts = torch.split(flat, [found[layer].numel() for layer in layers])
        found |= {layer: part.view_as(found[layer]) for layer, part in zip(layers, parts, strict=True)}
