"""No whole copy of anything is made while islands train, sync, validate, save, make snapshots and serve a joiner."""

import pytest
import torch
from allocations import config_of, watch

from diloco.checkpoint.log.pinned import LEAF
from diloco.plan.workload import workload_of

VECTORS = {"classic": 0, "overlapped": 1, "streaming": 1}  # besides parameters and momentum, of each island


@pytest.mark.slow
@pytest.mark.parametrize("mode", VECTORS)
def test_nothing_large_is_allocated_that_is_not_the_state_or_its_encoding(tmp_path, mode):
    config = config_of(mode, tmp_path, blocks=3, width=256, feed_forward=2048, steps=12)
    values, threads = workload_of(config).parameters, torch.get_num_threads()
    assert values > 4 * LEAF, "a whole vector is no leaf"
    torch.set_num_threads(1)
    try:
        allocations, lives = watch(config, values, limit=int(1.1 * values))  # an encoding, hence also a leaf
    finally:
        torch.set_num_threads(threads)
    assert allocations.undeclared == []
    joiner, islands, validations = 2, 2 * (2 + VECTORS[mode]), len(lives["A"].trainer.validation_losses)
    more = allocations.counts[4 * values] - joiner - islands
    assert 0 <= more <= VECTORS[mode] * validations  # what it has trained since a cut is kept while it validates
    assert validations and lives["A"].store.durable
