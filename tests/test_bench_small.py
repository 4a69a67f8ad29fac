"""What other benches count: real processes and real files, scaled down. What they measure depends on the machine."""

import pytest
import torch
from reads import Reads

from diloco.bench import checkpoint, dashboard, join, mesh, ranks, recover, trust
from diloco.bench.overhead import EVERY, STEPS_A_TURN, measure
from diloco.bench.team import trainer_of
from diloco.bench.viewers import measure_viewers
from diloco.data.batches import validation_batches
from diloco.island.mesh import ProcessMesh
from diloco.island.parallel import local
from diloco.run.join import alone

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_a_download_is_all_of_the_state_from_three_donors_and_a_return_the_rounds_since():
    report = join.downloads(1_000_000, 1, 200e6, pace_s=3.0)
    assert [check.name for check in report.checks] == ["join.time_over_link_limit", "join.replay_byte_saving"]
    (row,) = report.figures["downloads"].values()
    assert len(row["bytes_of_each"]) == 3 and sum(row["bytes_of_each"]) == report.figures["state_bytes"] == 8_000_000
    rounds, size = report.figures["return"]["rounds"], report.figures["return"]["bytes"]
    assert rounds is None or rounds * 500_000 < size < rounds * 600_000  # int4, and the records themselves


@pytest.mark.soak
def test_the_log_is_counted_by_its_files(tmp_path):
    figures = checkpoint._log_bytes(tmp_path, 200_000, rounds=6)
    assert figures["rounds"] >= 4
    assert figures["snapshots_bytes"] > figures["rounds"] * 1_600_000 > 10 * figures["log_bytes"]


@pytest.mark.soak
def test_with_rounds_every_block_of_the_overhead_has_one():
    report = measure(device="cpu", blocks=1, rounds=True)
    assert [check.name for check in report.checks] == ["overhead.with_rounds_ratio"]
    assert report.figures["rounds"] == 2  # the first block warms up
    assert EVERY % STEPS_A_TURN == 0


def test_a_mesh_that_is_forced_on_one_process_computes_what_the_process_does_without_it():
    cpu = torch.device("cpu")
    with mesh.forced_mesh(cpu, "gloo") as forced:
        config = mesh.config_of("tiny", batch=2, sequence=16, vocab=256, steps=40)
        plain_s, forced_s, losses = mesh.compare(config, ProcessMesh(0, 1, cpu, None), forced, blocks=1)
    assert len(plain_s) == len(forced_s) == 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_on_a_mesh_reads_nothing_from_the_device_and_skips_there_what_is_not_finite(optimizer):
    config = mesh.config_of("tiny", batch=2, sequence=16, vocab=256, steps=40)
    config = config.model_copy(update={"inner": config.inner.model_copy(update={"optimizer": optimizer})})
    with (
        mesh.forced_mesh(torch.device("cpu"), "gloo") as forced,
        trainer_of(config, forced) as (trainer, _),
        alone(trainer),
    ):
        island = trainer.island
        trainer.advance()
        with Reads() as reads:
            trainer.advance()
        assert reads.count == 0
        assert island.skipped == 0
        held = {name: local(parameter).clone() for name, parameter in island.parameters.items()}
        hook = island.module.register_forward_hook(lambda module, inputs, logits: logits * float("inf"))
        trainer.advance()
        hook.remove()
        assert island.skipped == 1
        assert all(torch.equal(held[name], local(parameter)) for name, parameter in island.parameters.items())
        trainer.advance()
        assert island.skipped == 1
        assert not any(torch.equal(held[name], local(parameter)) for name, parameter in island.parameters.items())


def test_what_a_mesh_has_gathered_for_an_evaluation_is_not_used_after_a_write():
    config = mesh.config_of("tiny", batch=2, sequence=16, vocab=256, steps=40)
    with (
        mesh.forced_mesh(torch.device("cpu"), "gloo") as forced,
        trainer_of(config, forced) as (trainer, _),
        trainer_of(config, ProcessMesh(0, 1, torch.device("cpu"), None)) as (plain, _),
    ):
        batches = list(validation_batches(trainer.samples, config.island, forced, 4))
        before = trainer.island.evaluate(batches)
        new = torch.randn(trainer.island.layout.size, generator=torch.Generator().manual_seed(1)) * 0.1
        for island in (trainer.island, plain.island):
            island.shards.write(new, [name for name in island.parameters if name.startswith("blocks.")])
        after = trainer.island.evaluate(batches)
        assert after != pytest.approx(before, rel=1e-3)
        assert after == pytest.approx(plain.island.evaluate(batches), rel=1e-5)


@pytest.mark.soak
def test_a_killed_process_is_named_and_its_island_back_whoever_founded_the_run():
    report = ranks.measure(every_s=15.0, faults=1)
    assert [check.name for check in report.checks] == [
        "ranks.named_s", "ranks.rounds_until_back", "ranks.others_round_ratio"
    ]  # fmt: skip
    assert len(report.figures["faults"]) == 2
    assert all(row["right"] for row in report.figures["faults"].values())


@pytest.mark.soak
def test_viewers_look_while_steps_are_timed_and_do_not_end(small):
    """Real ones, by a ticket to watch. How long steps take says nothing here."""
    config = small(inner={"steps": 1000}, sync={"every": 5})
    report = measure_viewers(config, viewers=2, blocks=1, steps=5, turns=1)
    (check,) = report.checks
    assert check.name == "overhead.viewers_ratio" and check.value > 0
    assert report.figures["looks"] > 0 and report.figures["rounds"] > 1


@pytest.mark.soak
def test_a_newcomer_gets_in_with_and_without_checks_and_what_admissions_cost_is_counted():
    report = trust.measure(islands=3, seconds=3.0, newcomers=1)
    assert [check.name for check in report.checks] == ["trust.control_bytes_more", "trust.join_s_more"]
    assert 0 < report.figures["admission_bytes_per_s"] < report.figures["directory_bytes_per_s"]
    assert min(report.figures["join_s"] + report.figures["join_s_unchecked"]) > 0


@pytest.mark.soak
def test_a_member_that_is_lost_late_over_slow_links_is_in_the_round_and_costs_few_bytes():
    report = recover.measure(values=400_000, silence_s=4.0, islands=3, line=(10e6, 0.005), into=0.5)
    assert [check.name for check in report.checks] == ["recover.extra_bytes_share", "recover.digests_equal"]
    assert report.checks[1].holds and report.figures["victim_counted"]
    assert report.figures["exchange_bytes"] > 2 * 400_000


@pytest.mark.soak
def test_a_page_of_a_made_run_is_used_and_shows_an_island_that_is_killed():
    report = dashboard.measure(islands=4, rounds=600)
    used = report.figures["interactions"]
    assert used and min(each["until_frame_ms"] for each in used.values()) > 0
    assert [check.value for check in report.checks if check.name == "dashboard.complaints"] == [0]
