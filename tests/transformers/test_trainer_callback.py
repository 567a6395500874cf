"""`sightline.transformers.MonitorCallback`: the Trainer logs the numbers, beside what it logs itself."""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import sightline
from sightline.transformers import MonitorCallback
from tiny_models import VOCABULARY, make_model


class Texts(torch.utils.data.Dataset):
    """Texts of equal length, whose labels are their tokens."""

    def __len__(self):
        return 16

    def __getitem__(self, number):
        ids = torch.randint(1, VOCABULARY, (6,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class FakeTrainer:
    """A Trainer that runs the callback's hooks, and whose `log` switches `should_log` off, as the real one does."""

    def __init__(self, model):
        self.model, self.logged = model, []
        self.state, self.control = SimpleNamespace(global_step=0), SimpleNamespace(should_log=False)

    def log(self, values):
        self.logged.append((self.state.global_step, values))
        self.control.should_log = False

    def train(self, callback, batches):
        for batch in batches:
            callback.on_step_begin(None, self.state, self.control, model=self.model)
            self.model(**batch).loss.backward()
            self.state.global_step += 1
            self.control.should_log = self.state.global_step % 2 == 1
            expected = self.control.should_log
            callback.on_step_end(None, self.state, self.control)
            assert self.control.should_log is expected
        callback.on_train_end(None, self.state, self.control)


def largest_scores(model, batch):
    with torch.no_grad(), sightline.watch(model, see=sightline.max_score()) as seen:
        model(**batch)
    return {call.layer: call["max_score"].score.amax((0, 2)) for call in seen}


def test_hooks_log_the_numbers_of_chosen_steps_and_keep_requests_to_log():
    model = make_model("Llama")
    batches = [{name: rows[None] for name, rows in Texts()[number].items()} for number in range(4)]
    trainer = FakeTrainer(model)
    callback = MonitorCallback(trainer, every=2)
    trainer.train(callback, batches)
    assert [step for step, _ in trainer.logged] == [1, 3]
    assert [step.number for step in callback.monitor.history] == [0, 2]
    for place, (_, values) in enumerate(trainer.logged):
        for layer, scores in largest_scores(model, batches[2 * place]).items():
            np.testing.assert_array_equal(callback.monitor.history[place].layers[layer].max_score, scores)
            assert values[f"attention/{layer}/max_score"] == scores.max()


@pytest.mark.skipif(find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_a_trainer_logs_the_numbers_beside_its_own(tmp_path):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
    )
    trainer = transformers.Trainer(make_model("Llama").train(), arguments, train_dataset=Texts(), eval_dataset=Texts())
    callback = MonitorCallback(trainer, every=2)
    trainer.add_callback(callback)
    trainer.train()
    history = callback.monitor.history
    assert [step.number for step in history] == [0, 2, 4]
    for step in history:  # 2 batches of 2 texts of 6 tokens, twice because of the checkpoints; no evaluation
        assert all((heads.queries == 48).all() for heads in step.layers.values())
    logged = trainer.state.log_history
    assert [entry["step"] for entry in logged if "attention/max_score" in entry] == [1, 3, 5]
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2, 3, 4, 5]
    again = transformers.Trainer(make_model("Llama").train(), arguments, train_dataset=Texts(), eval_dataset=Texts())
    resumed = MonitorCallback(again, every=2)
    again.add_callback(resumed)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [step.number for step in resumed.monitor.history] == [2, 4]
