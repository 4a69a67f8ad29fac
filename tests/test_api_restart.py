"""A training loop of one's own that is started again: it goes on, or says why it does not."""

import shutil
from contextlib import suppress

import pytest
import torch
from alone import train as train_alone
from own_loops import DATA, PLAIN, made, run_of, train, train_all, vector
from torch import nn

import diloco
from diloco.errors import DilocoError, JoinRefused, SaveError
from diloco.history.load import load_trained


def run_at(tmp_path, **sections) -> dict:
    """A run without others: one that comes back leads as soon as it has heard nobody for a second."""
    return run_of(tmp_path, elastic={"silence_s": 1}, **sections)


class Killed(Exception):
    """The block is left at once, and nothing is saved on the way."""


def with_dropout(seed: int) -> nn.Module:
    return made(seed).insert(2, nn.Dropout(0.5))


def train_until(where: dict, stop: int, seed: int, *, killed: bool = False) -> tuple[list[float], torch.Tensor, int]:
    """A program that is started, and ends there: its losses, the model's and the outer parameters, its first step."""
    model, losses = with_dropout(seed), []
    torch.manual_seed(seed)
    with (
        suppress(Killed),
        diloco.connect(where, model, "AdamW", optimizer_options={"lr": 0.01}, alone=True) as run,
    ):
        first = run.step_count + 1
        for batch in run.batches(DATA, 4):
            losses.append(train(model, run.optimizer, batch).item())
            run.step(loss=losses[-1])
            if run.step_count == stop:
                if killed:
                    raise Killed
                break
        with run.outer_parameters():
            outer = vector(model)
        return losses, torch.cat([vector(model), outer]), first
    return losses, torch.empty(0), first


def test_an_earlier_run_is_kept_or_refused(tmp_path):
    train_until(run_at(tmp_path), 12, seed=1)
    with pytest.raises(JoinRefused, match="the model differs"), diloco.connect(run_at(tmp_path), made(), alone=True):
        pass
    with diloco.connect(run_at(tmp_path), made(), alone=True, fresh=True) as run:
        assert run.step_count == 0
    assert (tmp_path / "run.1").exists()


@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}], ids=str)
def test_a_program_that_is_started_again_equals_one_that_never_stopped(tmp_path, capsys, sync):
    sections = {"inner": {"steps": 18}, "sync": {"every": 4, "codec": "fp32", **sync}}
    where = run_at(tmp_path, **sections) | {"checkpoint": {"dir": f"{tmp_path}/run", "snapshot_every": 1}}
    whole = where | {"checkpoint": {"dir": f"{tmp_path}/whole"}}
    losses, end, _ = train_until(whole, 18, seed=1)
    before, _, _ = train_until(where, 11, seed=1)
    after, found, first = train_until(where, 18, seed=2)  # other weights and other dice, as far as it knows
    assert before + after == losses and first == 12
    assert torch.equal(found, end)
    assert "resumes at step 11 of 18" in capsys.readouterr().out
    assert train_until(where, 18, seed=3)[0] == []  # there is nothing left to do


@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}], ids=str)
def test_a_program_that_was_killed_goes_on_from_its_last_round(tmp_path, sync):
    where = run_at(tmp_path, inner={"steps": 18}, sync={"every": 4, **sync})
    train_until(where, 11, seed=1, killed=True)
    _, end, first = train_until(where, 18, seed=2)
    assert first in (5, 9)  # the second round may have been committed, and not applied yet
    assert end.isfinite().all()
    assert train_until(where, 18, seed=3)[0] == []


CHANGES = [
    ({"seed": 1}, with_dropout, "AdamW", "seed cannot change: .* was made with 0"),
    ({"outer": {"optimizer": "adam", "lr": 1e-3}}, with_dropout, "AdamW", "outer.optimizer cannot change"),
    ({"inner": {"steps": 3}}, with_dropout, "AdamW", "is past inner.steps=3"),
    ({}, with_dropout, "SGD", "optimizer=AdamW, now it is SGD"),
    ({}, lambda seed: nn.Linear(3, 1), "AdamW", "the model differs"),
]


@pytest.mark.parametrize(("sections", "model", "optimizer", "message"), CHANGES, ids=[case[-1] for case in CHANGES])
def test_only_the_same_program_goes_on(tmp_path, sections, model, optimizer, message):
    train_until(run_at(tmp_path), 6, seed=1)
    with (
        pytest.raises(DilocoError, match=message),
        diloco.connect(run_at(tmp_path, **sections), model(0), optimizer, alone=True),
    ):
        pass


def test_runs_of_programs_and_of_the_built_in_trainer_are_told_apart(tmp_path, small):
    train_alone(small(), until=2)
    with (
        pytest.raises(DilocoError, match=r"the model differs|built-in trainer"),
        diloco.connect(small(), made(), alone=True),
    ):
        pass
    shutil.rmtree(small().dir)
    train_until(run_at(tmp_path), 6, seed=1)
    with pytest.raises(DilocoError, match=r"cannot change|differs"):
        train_alone(small(), resume=True)
    with pytest.raises(SaveError, match=r"program of its own .* inside `with run.outer_parameters\(\):`"):
        load_trained(tmp_path / "run")


@pytest.mark.slow
def test_a_founder_that_is_started_again_goes_on_from_its_log(tmp_path, capsys):
    where = run_at(tmp_path, inner={"steps": 20}, outer=PLAIN)
    options, model = {"optimizer_options": {"lr": 0.1}}, made()
    with suppress(Killed), diloco.connect(where, model, "SGD", **options) as run:
        for batch in run.batches(DATA, 4):
            train(model, run.optimizer, batch)
            run.step()
            if run.round and run.step_count == 10:
                with run.outer_parameters():
                    outer = vector(model)
                raise Killed
    with pytest.raises(SaveError, match=r"founded with seed=0, now it is 1"):  # noqa: SIM117
        with diloco.connect(where | {"seed": 1}, made(1), "SGD", **options):
            pass
    again = made(1)
    with diloco.connect(where, again, "SGD", **options) as run:
        assert run.step_count == 8 and torch.equal(vector(again), outer)
        train_all(run, again)
        assert run.finished and run.step_count == 20
    assert "resumes at step 8" in capsys.readouterr().out
