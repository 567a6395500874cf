"""`sightline.AttentionMonitor`, and `sightline.lightning.MonitorCallback` in a loop that calls Lightning's hooks."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import sightline
from fault_planting import Fault, assert_found
from monitored_models import CausalModel, define, make_batch
from sightline.api import functions
from sightline.errors import MissingExtraError, ParameterError
from sightline.statistics.monitoring import StepSums
from sightline.torch.watching import model_monitor
from watched_modules import Calling


def assert_numbers(recorded, expected):
    assert list(recorded.layers) == list(expected)
    for layer, rows in expected.items():
        np.testing.assert_allclose(np.stack(recorded.layers[layer][:3]), rows, rtol=1e-12)


def record(model, batches, **options):
    """Return the numbers of a step with these batches."""
    monitor = sightline.AttentionMonitor(model, **options)
    with monitor.step(0):
        for batch in batches:
            model(batch)
    return monitor.history[0]


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_numbers_and_gradients_of_accumulated_batches_are_those_of_the_definition(reentrant):
    model, batches = CausalModel(reentrant=reentrant), [make_batch(1), make_batch(2, 3)]
    gradients = []
    monitor = sightline.AttentionMonitor(model, every=2)
    for number in range(2):  # step 0 is recorded, step 1 is not
        model.zero_grad()
        with monitor.step(number):
            for batch in batches:
                model(batch).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert [step.number for step in monitor.history] == [0]
    assert_numbers(monitor.history[0], define(model, batches))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(StepSums.add, "xp.maximum(maximum, self.maxima[layer]), sums + self.totals[layer]", "maximum, sums"),
        Fault(StepSums.finish, "masses", "entropies"),
    ],
    ids=["a call is forgotten", "another statistic"],
)
def test_planted_faults_are_found(fault, monkeypatch):
    model, batches = CausalModel(), [make_batch(1), make_batch(2, 3)]
    assert_found(fault, monkeypatch, lambda: assert_numbers(record(model, batches), define(model, batches)))


def test_steps_between_run_as_without_a_monitor():
    model = CausalModel()
    monitor = sightline.AttentionMonitor(model, every=10)
    plain = model(make_batch(1))
    with monitor.step(7):
        assert not functions.OBSERVERS
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model(make_batch(1)), plain)
    assert not monitor.history


def test_results_of_a_forward_pass_are_dropped_when_it_ends(monkeypatch):
    opened = []

    class Watch:
        def __init__(self, *arguments, **options):
            self.watch = sightline.watch(*arguments, **options)

        def __enter__(self):
            opened.append(self.watch.__enter__())
            return opened[0]

        def __exit__(self, *error):
            return self.watch.__exit__(*error)

    monkeypatch.setattr(model_monitor, "watch", Watch)
    model = CausalModel()
    with sightline.AttentionMonitor(model).step(0):
        for seed in range(2):
            model(make_batch(seed))
            assert len(opened[0]) == 2 * (seed + 1)
            assert not any(call.results for call in opened[0])


def test_queries_that_see_no_key_are_in_no_mean():
    visible = torch.arange(6)[:, None] < torch.tensor([4, 0])[:, None, None, None]
    model = Calling(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=visible))
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    (heads,) = record(model, [x]).layers.values()
    scores = x[0, :, :4] @ x[0].mT / 2
    weights = scores.softmax(-1)
    np.testing.assert_array_equal(heads.queries, 4)
    np.testing.assert_allclose(heads.max_score, scores.amax((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(heads.first_key, weights[..., 0].mean(1), rtol=1e-12)
    np.testing.assert_allclose(heads.entropy, torch.special.entr(weights).sum(-1).mean(1), rtol=1e-12)


def test_a_log_gets_the_extremes_and_the_number_of_the_step():
    model, batch, lines = CausalModel(), make_batch(1), []
    monitor = sightline.AttentionMonitor(model, every=5, log=lambda values, step: lines.append((values, step)))
    for number in range(4, 6):
        with monitor.step(number):
            model(batch)
    ((values, step),) = lines
    rows = define(model, [batch])
    assert step == 5
    assert set(values) == {
        f"attention/{name}"
        for prefix in ("", "layers.0/", "layers.1/")
        for name in (f"{prefix}max_score", f"{prefix}min_entropy", f"{prefix}max_first_key")
    } | {f"attention/layers.{k}/max_score_head" for k in range(2)}
    assert values["attention/layers.1/max_score"] == pytest.approx(rows["layers.1"][0].max(), rel=1e-12)
    assert values["attention/layers.1/max_score_head"] == rows["layers.1"][0].argmax()
    assert values["attention/min_entropy"] == pytest.approx(min(row[1].min() for row in rows.values()), rel=1e-12)
    assert values["attention/max_first_key"] == pytest.approx(max(row[2].max() for row in rows.values()), rel=1e-12)


def test_hooks_before_and_after_a_step_and_parts_that_are_joined():
    model, batches = CausalModel(), [make_batch(1), make_batch(2, 3)]
    monitor = sightline.AttentionMonitor(model, every=2)
    found = []
    for number, joins, batch in ((0, False, batches[0]), (0, True, batches[1]), (1, False, batches[0])):
        monitor.begin_step(number, joins=joins)
        model(batch)
        found.append(monitor.end_step())
    assert_numbers(monitor.history[0], define(model, batches))
    assert len(monitor.history) == 1
    assert found[1] == monitor.history[0].summary()
    assert found[2] is None


def test_a_step_that_fails_or_is_cancelled_is_not_recorded():
    model = CausalModel()
    monitor = sightline.AttentionMonitor(model)
    monitor.begin_step(0)
    model(make_batch(1))
    monitor.cancel_step()
    with pytest.raises(AttributeError), monitor.step(0):
        model(None)
    monitor.begin_step(0)
    monitor.begin_step(1)  # after an error that skipped the end
    assert monitor.end_step() is None
    assert not monitor.history
    assert not functions.OBSERVERS
    assert not any(module._forward_hooks for module in model.modules())


def test_the_newest_steps_are_kept():
    model = CausalModel()
    monitor = sightline.AttentionMonitor(model, every=1, keep=2)
    for number in range(4):
        with monitor.step(number):
            model(make_batch(1))
    assert [step.number for step in monitor.history] == [2, 3]


def test_layers_are_selected():
    model, batch = CausalModel(), make_batch(1)
    found = record(model, [batch, batch], layers=[-1])
    assert_numbers(found, {"layers.1": define(model, [batch])["layers.1"]})


def test_statistics_are_those_of_autocast():
    model, batch = CausalModel().float(), make_batch(1).float().detach()
    monitor = sightline.AttentionMonitor(model)
    with torch.autocast("cpu", torch.bfloat16), monitor.step(0), sightline.watch(model, sightline.max_score()) as seen:
        model(batch)
    assert seen["max_score"][0].score.dtype == torch.float32
    for call in seen:
        largest = call["max_score"].score.amax((0, 2))
        np.testing.assert_array_equal(monitor.history[0].layers[call.layer].max_score, largest.detach())


def test_chosen_steps_compile_nothing_again():
    model, batch, counter = CausalModel(), make_batch(1), CompileCounter()
    program = torch.compile(model, backend=counter)
    monitor = sightline.AttentionMonitor(program, every=2)
    program(batch).sum().backward()
    before = counter.frame_count
    for number in range(6):
        with monitor.step(number):
            program(batch).sum().backward()
    assert counter.frame_count == before > 0
    assert len(monitor.history) == 3
    assert_numbers(monitor.history[-1], define(model, [batch]))


def test_errors_say_what_is_allowed(monkeypatch):
    for every in (0, 1.5, True, "100"):
        for name in ("every", "keep"):
            with pytest.raises(ParameterError, match=rf"(?s){name}=.*whole number of at least 1"):
                sightline.AttentionMonitor(CausalModel(), **{name: every})
    with pytest.raises(ParameterError, match="a function of a dict"):
        sightline.AttentionMonitor(CausalModel(), log=SimpleNamespace())
    with pytest.raises(ParameterError, match=r"torch\.nn\.Module"):
        sightline.AttentionMonitor("a model")
    monitor = sightline.AttentionMonitor(Calling(lambda x: torch.softmax(x @ x.mT, -1) @ x))
    for number in (-1, 0.5, "0", None):
        with pytest.raises(ParameterError, match=r"(?s)step\(.*whole number of at least 0"), monitor.step(number):
            pass
    with pytest.raises(ParameterError, match="written by hand"), monitor.step(0):
        monitor.model(torch.randn(2, 3, 4))
    assert not monitor.history
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "sightline.lightning", raising=False)
    with pytest.raises(MissingExtraError, match="pip install lightning"):
        __import__("sightline.lightning")


# -- the callback of Lightning -----------------------------------------------------------------------------------------


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
        assert_numbers(step, define(module, batches[start : start + 2]))
    for logger in trainer.loggers:
        assert logger.lines == [(step.number, step.summary()) for step in callback.monitor.history]


def test_an_error_ends_the_step(callback_class):
    module, callback = CausalModel(), callback_class(every=1)
    callback.on_exception(None, None, None)  # before the training
    with pytest.raises(AttributeError):
        fit(callback, module, [make_batch(0), None], 1)
    assert [step.number for step in callback.monitor.history] == [0]
    assert not any(part._forward_hooks for part in module.modules())
