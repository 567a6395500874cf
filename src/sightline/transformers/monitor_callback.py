"""The monitor of attention as a callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers

from ..model_monitor import AttentionMonitor


class MonitorCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """`sightline.AttentionMonitor` for transformers' Trainer, whose `log` gets the numbers.

    A step is one step of the optimizer, with all parts of gradient accumulation. Evaluations between steps are not
    recorded. A resumed training goes on with the Trainer's number of the step.

    Parameters
    ----------
    trainer : transformers.Trainer
        The callback is added to it by `trainer.add_callback`.
    every, layers : as in `sightline.AttentionMonitor`

    Attributes
    ----------
    monitor : AttentionMonitor
        Its `history` has the numbers of every head.

    Raises
    ------
    ParameterError
        As `sightline.AttentionMonitor`.

    Examples
    --------
    >>> trainer = transformers.Trainer(model, arguments, train_dataset=texts)  # doctest: +SKIP
    >>> trainer.add_callback(sightline.transformers.MonitorCallback(trainer, every=100))  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self, trainer: Any, every: int = 100, *, layers: str | int | Sequence[str | int] | None = None
    ) -> None:
        self.trainer = trainer
        self.monitor = AttentionMonitor(trainer.model, every, layers=layers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step, which the monitor may record. A step that an error has ended before is dropped."""
        self.monitor.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the numbers. What the Trainer itself wants to log at this step stays requested."""
        values = self.monitor.end_step()
        if values is not None:
            should_log = control.should_log
            self.trainer.log(values)
            control.should_log = should_log

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop a step that was begun."""
        self.monitor.cancel_step()
