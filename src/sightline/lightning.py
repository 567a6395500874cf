"""The monitor of attention as a callback of Lightning.

The import raises MissingExtraError if neither `lightning` nor `pytorch_lightning` is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from .errors import MissingExtraError, check_count
from .torch.watching.model_monitor import AttentionMonitor

__all__ = ["MonitorCallback"]


def _callback_class() -> Any:
    """Return Lightning's class `Callback`. A package of Lightning that is already imported is preferred."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        with suppress(ImportError):
            return import_module(name).Callback
    raise MissingExtraError("sightline.lightning without Lightning", "Lightning 2", "pip install lightning")


class MonitorCallback(_callback_class()):  # type: ignore[misc]
    """`sightline.AttentionMonitor` for Lightning's Trainer. The Trainer's loggers get the numbers.

    A step is one step of the optimizer. With gradient accumulation, the numbers of all batches of a step are joined.
    They are logged, with the step's number, when the optimizer has made the step.

    Parameters
    ----------
    every, layers : as in `sightline.AttentionMonitor`

    Attributes
    ----------
    monitor : AttentionMonitor
        It is created when the training starts. Its `history` has the numbers of every head.

    Raises
    ------
    ParameterError
        In the cases in which `sightline.AttentionMonitor` raises it.

    Examples
    --------
    >>> trainer = lightning.Trainer(callbacks=[MonitorCallback(every=100)])  # doctest: +SKIP
    >>> trainer.fit(module, batches)  # doctest: +SKIP
    """

    monitor: AttentionMonitor

    def __init__(self, every: int = 100, *, layers: str | int | Sequence[str | int] | None = None) -> None:
        super().__init__()
        self.every, self.layers, self._number = check_count("every={!r}", every, 1, "every=100"), layers, -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor of the module."""
        self.monitor = AttentionMonitor(pl_module, self.every, layers=self.layers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the step of the batch. The monitor records a step if the step's number is a multiple of `every`."""
        joins, self._number = trainer.global_step == self._number, trainer.global_step
        self.monitor.begin_step(self._number, joins=joins)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the numbers if the optimizer has made its step."""
        values = self.monitor.end_step()
        if values is not None and trainer.global_step > self._number:
            for logger in trainer.loggers:
                logger.log_metrics(values, self._number)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Drop the step that was begun."""
        if self._number >= 0:
            self.monitor.cancel_step()
