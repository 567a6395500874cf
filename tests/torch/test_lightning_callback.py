"""`sightline.lightning.MonitorCallback` in a loop that calls the hooks which Lightning documents."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from monitored_models import CausalModel, define, make_batch


class Callback:
    """What a callback of Lightning derives from."""


@pytest.fixture
def callback_class(monkeypatch):
    """The callback on a stand-in for Lightning, whether it is installed or not."""
    package, inner = ModuleType("lightning"), ModuleType("lightning.pytorch")
    package.pytorch, inner.Callback = inner, Callback
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)
    monkeypatch.delitem(sys.modules, "sightline.lightning", raising=False)
    yield import_module("sightline.lightning").MonitorCallback
    sys.modules.pop("sightline.lightning")


class Logger:
    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))


def fit(callback, module, batches, accumulate):
    """Train as Lightning does with `accumulate_grad_batches`; return the trainer."""
    trainer = SimpleNamespace(global_step=0, loggers=[Logger(), Logger()])
    callback.on_train_start(trainer, module)
    try:
        for number, batch in enumerate(batches):
            callback.on_train_batch_start(trainer, module, batch, number)
            module(batch).sum().backward()
            trainer.global_step += (number + 1) % accumulate == 0
            callback.on_train_batch_end(trainer, module, None, batch, number)
    except Exception as error:
        callback.on_exception(trainer, module, error)
        raise
    return trainer


def test_numbers_of_accumulated_batches_are_logged_once_to_each_logger(callback_class):
    module, batches = CausalModel(), [make_batch(seed) for seed in range(6)]
    callback = callback_class(every=2)
    assert isinstance(callback, Callback)
    trainer = fit(callback, module, batches, 2)
    assert [step.number for step in callback.monitor.history] == [0, 2]
    for step, start in zip(callback.monitor.history, (0, 4), strict=True):
        for layer, rows in define(module, batches[start : start + 2]).items():
            np.testing.assert_allclose(np.stack(step.layers[layer][:3]), rows, rtol=1e-12)
    for logger in trainer.loggers:
        assert logger.lines == [(step.number, step.summary()) for step in callback.monitor.history]


def test_an_error_ends_the_step(callback_class):
    module, callback = CausalModel(), callback_class(every=1)
    callback.on_exception(None, None, None)  # before the training
    with pytest.raises(AttributeError):
        fit(callback, module, [make_batch(0), None], 1)
    assert [step.number for step in callback.monitor.history] == [0]
    assert not any(part._forward_hooks for part in module.modules())
