"""Frameworks that own the loop, in a run by a callback: Hugging Face's Trainer and Lightning, as real programs."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from runpy import run_path

import pytest
import torch
from conftest import read_events
from launched import wait_until
from own_loops import run_of

from diloco.errors import LoopError

EXAMPLES = Path(__file__).parent.parent / "examples"
FRAMEWORKS = {  # the package, the example, where it founds its run
    "hf": ("accelerate", "hf_trainer.py", "hf-trainer"),
    "lightning": ("lightning", "lightning_module.py", "lightning"),
}


@pytest.mark.cluster
@pytest.mark.parametrize("framework", ["hf", "lightning"])
def test_two_programs_learn_together_and_hold_the_same(tmp_path, framework):
    package, example, run = FRAMEWORKS[framework]
    pytest.importorskip(package)
    command = [sys.executable, str(EXAMPLES / example), "--steps", "60"]
    options = {
        "cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE, "text": True,
    }  # fmt: skip
    ticket = tmp_path / "runs" / run / "ticket"
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen([*command, *words], **options))
            stack.callback(process.kill)
            return process

        founder = start("--islands", "2")
        assert wait_until(lambda: ticket.exists() or founder.poll() is not None)
        joiner = start(str(ticket), "--name", "second", "--dir", "second", "--seed", "2")
        for process in (founder, joiner):
            out, err = process.communicate(timeout=600)
            assert process.returncode == 0, err[-3000:]
            assert "step 60 of 60, finished: True" in out
    told = [read_events(tmp_path / folder / "events.jsonl") for folder in (f"runs/{run}", "second")]
    for events in told:
        losses = [event["loss"] for event in events if event["event"] == "step" and event["loss"] is not None]
        assert losses[-1] < 0.8 * losses[0]
    ends = [events[-1] for events in told]
    assert {end["event"] for end in ends} == {"agreed"} and len({(end["state"], end["chain"]) for end in ends}) == 1
    rounds = [set(event["contributors"]) for event in told[0] if event["event"] == "round" and event["contributors"]]
    assert rounds.count({"island-1", "second"}) > len(rounds) / 2


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value.clone() for state in optimizer.state_dict()["state"].values() for value in state.values()
    ]  # step, first and second moment of each parameter


def hf_life(where: dict, tmp_path: Path, steps: int) -> tuple[list, list, float, object]:
    """Moments and learning rate at the beginning, moments at the end, and the callback."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from diloco.integrations.hf import DilocoCallback

    example = run_path(str(EXAMPLES / "hf_trainer.py"))
    seen = {}

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, **kwargs):
            seen["begin"], seen["lr"] = moments(optimizer), optimizer.param_groups[0]["lr"]

        def on_train_end(self, args, state, control, optimizer, **kwargs):
            seen["end"] = moments(optimizer)

    config = transformers.LlamaConfig(
        vocab_size=example["VOCAB"], hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=steps, learning_rate=1e-2, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callback = DilocoCallback(where, alone=True)
    model = transformers.LlamaForCausalLM(config)
    transformers.Trainer(model, arguments, train_dataset=example["Counting"](), callbacks=[callback, Look()]).train()
    return seen["begin"], seen["end"], seen["lr"], callback


def lightning_life(where: dict, tmp_path: Path, steps: int) -> tuple[list, list, float, object]:
    lightning = pytest.importorskip("lightning")
    from diloco.integrations.lightning import DilocoCallback

    example = run_path(str(EXAMPLES / "lightning_module.py"))
    seen = {}

    class Decaying(example["Imitation"]):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Look(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            seen["begin"] = moments(trainer.optimizers[0])
            seen["lr"] = trainer.optimizers[0].param_groups[0]["lr"]

        def on_train_end(self, trainer, pl_module):
            seen["end"] = moments(trainer.optimizers[0])

    callback = DilocoCallback(where, alone=True)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, callbacks=[callback, Look()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Decaying(), torch.utils.data.DataLoader(example["samples"](), batch_size=16))
    return seen["begin"], seen["end"], seen["lr"], callback


LIVES = {"hf": hf_life, "lightning": lightning_life}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_program_that_is_started_again_has_its_optimizer_and_learning_rate(tmp_path, framework):
    life, where = LIVES[framework], run_of(tmp_path, inner={"steps": 12})
    begin, end, first_rate, callback = life(where, tmp_path, 7)
    assert begin == [] and end and callback.run.step_count == 7 and not callback.run.finished
    again, last, rate, callback = life(where, tmp_path, 12)
    assert len(again) == len(end) and all(torch.equal(one, other) for one, other in zip(again, end, strict=True))
    assert rate == pytest.approx(first_rate * 5 / 12)  # linear decay, by the run's clock
    assert callback.run.finished and callback.run.step_count == 12 and last[0].item() == 12
    finished, idle, _, callback = life(where, tmp_path, 12)
    assert callback.run.step_count == 12 and all(torch.equal(a, b) for a, b in zip(finished, idle, strict=True))


@pytest.mark.slow
def test_an_exception_while_lightning_fits_leaves_at_once(tmp_path):
    lightning = pytest.importorskip("lightning")
    from diloco.integrations.lightning import DilocoCallback

    example = run_path(str(EXAMPLES / "lightning_module.py"))

    class Broken(example["Imitation"]):
        def training_step(self, batch, batch_idx):
            assert batch_idx < 6, "it broke"
            return super().training_step(batch)

    where = run_of(tmp_path, inner={"steps": 12})
    callback = DilocoCallback(where, alone=True)
    with pytest.raises(LoopError, match="after training has begun"):
        _ = callback.run
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="it broke"):
        trainer.fit(Broken(), torch.utils.data.DataLoader(example["samples"](), batch_size=16))
    assert callback.run.step_count == 6
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert "end" not in {event["event"] for event in events}
