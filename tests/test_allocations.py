"""No whole copy of anything is made while islands train, sync, validate, save, make snapshots and serve a joiner."""

import pytest
import torch
from allocations import config_of, watch

from diloco.bench import memory
from diloco.checkpoint.log.pinned import LEAF
from diloco.plan.fit import RUNTIME
from diloco.plan.workload import workload_of

VECTORS = {"classic": 0, "overlapped": 1, "streaming": 1}  # besides parameters and momentum, of each island


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("mode", VECTORS)
def test_nothing_large_is_allocated_that_is_not_the_state_or_its_encoding(tmp_path, mode):
    config = config_of(mode, tmp_path, blocks=3, width=256, feed_forward=2048, steps=12)
    values = workload_of(config).parameters
    assert values > 4 * LEAF, "a whole vector is no leaf"
    allocations, lives = watch(config, values, limit=int(1.1 * values))  # an encoding, hence also a leaf
    assert allocations.undeclared == []
    joiner, islands, validations = 2, 2 * (2 + VECTORS[mode]), len(lives["A"].trainer.validation_losses)
    more = allocations.counts[4 * values] - joiner - islands
    assert 0 <= more <= VECTORS[mode] * validations  # what it has trained since a cut is kept while it validates
    assert validations and lives["A"].store.durable


@pytest.mark.soak
@pytest.mark.parametrize("mode", VECTORS)
def test_a_model_of_150_million_parameters_allocates_nothing_undeclared_above_128_mib(tmp_path, mode):
    config = config_of(mode, tmp_path, blocks=20, width=768, feed_forward=2304, steps=12)
    values = workload_of(config).parameters
    assert values > 150e6
    allocations, lives = watch(config, values, limit=128 << 20)
    assert allocations.undeclared == []
    assert allocations.counts[4 * values] and lives["A"].store.durable


@pytest.mark.soak
@pytest.mark.parametrize("mode", VECTORS)
def test_an_island_of_150_million_parameters_stays_within_its_budget_from_its_start_to_its_end(mode):
    config = memory.config_of(mode, 150_000_000, rounds := 12)
    seen = memory.island_memory(config, rounds)
    budget = memory.BUDGET[mode] * seen.parameters
    assert seen.parameters > 140e6
    assert budget / 2 < seen.peak - memory.bare_peak(config).host < memory.LIMIT * budget + RUNTIME["cpu"]
