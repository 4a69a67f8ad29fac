"""A run of one on each device, with the outer state on the host or on the device: what a round leaves in the island."""

import pytest
import torch

from diloco.bench.team import trainer_of
from diloco.run.join import alone

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PLACES = [
    ("cpu", "host"),
    pytest.param("cuda", "host", marks=NO_GPU),
    pytest.param("cuda", "device", marks=NO_GPU),
]


@pytest.mark.parametrize(("device", "outer"), PLACES)
@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}, {"fragments": 2}, {"codec": "sparse"}], ids=str)
def test_after_its_rounds_the_island_holds_the_outer_parameters(small, device, outer, sync):
    config = small(
        island={"device": device, "outer": outer}, sync={"every": 4, "codec": "int4", **sync}, inner={"steps": 12}
    )
    with trainer_of(config) as (trainer, _), alone(trainer):
        while not trainer.finished:
            trainer.advance()
        replica = trainer.rounds.driver.replica
        held = torch.empty(trainer.layout.size, device=replica.vectors["parameters"].device)
        trainer.shards.read(held)
        assert trainer.sync.view.updates >= 3
        assert replica.vectors["parameters"].device.type == (device if outer == "device" else "cpu")
        if sync.get("apply") != "eager":  # there it goes on from a preview
            assert torch.allclose(held, replica.vectors["parameters"], atol=1e-6)
        assert len(replica.digest()) == 64
