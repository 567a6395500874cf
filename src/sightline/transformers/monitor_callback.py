"""`sightline.AttentionMonitor` as a callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers

from ..torch.watching.model_monitor import AttentionMonitor


class MonitorCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Record numbers of each attention head while transformers' Trainer trains, and log them by `Trainer.log`.

    `sightline.AttentionMonitor` records the numbers. A step is one step of the optimizer, with all parts of gradient
    accumulation. Evaluations between steps are not recorded. A resumed training continues the Trainer's step numbers.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer to which `trainer.add_callback` adds this callback.
    every, layers : as in `sightline.AttentionMonitor`

    Attributes
    ----------
    monitor : AttentionMonitor
        `monitor.history` has the numbers of every head.

    Raises
    ------
    ParameterError
        `sightline.AttentionMonitor` does not accept `every` or `layers`.

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
        """Begin a step, which the monitor may record. If an error ended the step before, that step is dropped."""
        self.monitor.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the numbers of a recorded step. The Trainer's own logging at this step is not changed."""
        values = self.monitor.end_step()
        if values is not None:
            should_log = control.should_log
            self.trainer.log(values)
            control.should_log = should_log

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop a step that was begun and not ended."""
        self.monitor.cancel_step()
