"""The monitor of attention as a callback of Keras, on each of its backends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras

from ..arrays.operations import to_numpy
from ..errors import ParameterError, check_count
from ..statistics.monitoring import MONITORED, MonitoredStep, StepSums
from .backend_attention import observing


class MonitorCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Record the largest score, the entropy and the weight on the first key of each head at chosen batches of `fit`.

    Compiled train steps return no statistics. So the callback runs the model on `sample` before a chosen batch, with
    `training=False`, and records the layers of `sightline.keras` in this run. The callback works on every backend. It
    adds the newest numbers to the logs of each epoch, which Keras's `History` keeps.

    Parameters
    ----------
    sample : inputs of the model, such as the first eight of the training data
    every : int, default 100
        The batches 0, every, 2 · every, … are chosen, counted over all epochs and calls of `fit`. With Keras's
        `steps_per_execution=k`, each k batches count as one.
    log : function (values, number of the batch), optional
        Called for each chosen batch with the dict of `MonitoredStep.summary`.
    keep : int, default 1,000
        The number of newest chosen batches that `history` keeps.

    Attributes
    ----------
    history : deque of MonitoredStep
        The numbers of every head at the newest chosen batches.

    Raises
    ------
    ParameterError
        `every` or `keep` is not a whole number of at least 1, or, in `fit`, no layer of `sightline.keras` runs.

    Examples
    --------
    >>> model.fit(x, y, callbacks=[sightline.keras.MonitorCallback(x[:8], every=100)])  # doctest: +SKIP
    """

    def __init__(
        self,
        sample: Any,
        every: int = 100,
        *,
        log: Callable[[dict[str, float], int], Any] | None = None,
        keep: int = 1_000,
    ) -> None:
        super().__init__()
        self.sample, self.every, self.log = sample, check_count("every={!r}", every, 1, "every=100"), log
        self.history: deque[MonitoredStep] = deque(maxlen=check_count("keep={!r}", keep, 1, "keep=100"))
        self._count = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Run the model on the sample if the batch is chosen."""
        if self._count % self.every == 0:
            self._record()
        self._count += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the newest numbers to the logs of the epoch."""
        if logs is not None and self.history:
            logs.update(self.history[-1].summary())

    def _record(self) -> None:
        sums = StepSums()

        def add(layer: str, results: Sequence[Any]) -> None:
            arrays = [to_numpy(array) for array in (results[0].score, *results[1:])]
            arrays = [array.reshape(-1, *array.shape[-2:]) for array in arrays]  # one batch axis before the heads
            sums.add(layer, [results[0]._replace(value=arrays[0]), *arrays[1:]])

        with observing(MONITORED, add):
            self.model(self.sample, training=False)
        if not sums.maxima:
            given = f"the model {self.model.name}, in which no layer of sightline.keras ran"
            allowed = "a model with sightline.keras.MultiHeadAttention or ScaledDotProductAttention"
            cure = "use sightline.keras.MultiHeadAttention in place of keras.layers.MultiHeadAttention"
            raise ParameterError(given, allowed, cure)
        self.history.append(sums.finish(self._count, [*sums.maxima]))
        if self.log is not None:
            self.log(self.history[-1].summary(), self._count)
