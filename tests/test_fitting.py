"""`island.accumulate: auto`. On a mesh: test_mesh.py."""

import pytest
import torch
from alone import Life, train
from scarce import OUT_OF_MEMORY, Scarce

from diloco.config.file import own_island
from diloco.errors import ConfigError, DeviceError

REFUSED = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 20 GiB")


def said(life: Life) -> list[str]:
    return [event["text"] for event in life.events("note") if "accumulate" in event["text"]]


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, REFUSED])
@pytest.mark.parametrize("late", [False, True])
def test_the_fewest_micro_batches_that_fit_are_found_and_train_as_if_they_were_written_down(
    small, tmp_path, error, late
):
    exact = {"codec": "fp32"}  # others round by noise of the island's own
    with Scarce(rows=2, late=late, error=error) as scarce:
        found = train(small(island={"accumulate": "auto"}, sync=exact))
    written = train(small(island={"accumulate": 4}, sync=exact, checkpoint={"dir": str(tmp_path / "written")}))
    passes = [8, 4, 4, 2, 2] if late else [8, 4, 2, 2]
    assert scarce.tried[: len(passes)] == passes
    assert set(scarce.tried[len(passes) :]) == {2}
    (start,) = found.events("start")
    assert start["accumulate"] == 4 and start["tokens_per_step"] == written.events("start")[0]["tokens_per_step"]
    assert said(found)[0].startswith(
        "island.accumulate=auto: 4, for 2 samples at a time; with 1, 2 a step did not fit into cpu"
    )
    assert found.losses == written.losses
    assert all(torch.equal(found.outer[name], written.outer[name]) for name in written.outer)


def test_a_number_that_does_not_halve_the_batch_is_found_too(small):
    with Scarce(rows=2) as scarce:
        life = train(small(island={"batch": 6, "accumulate": "auto"}, inner={"steps": 3}))
    assert life.events("start")[0]["accumulate"] == 3
    assert scarce.tried[:3] == [6, 3, 2]


def test_resumed_where_another_number_fits_an_island_trains_on_the_same_samples(small, tmp_path):
    def samples(*lives: Life) -> list[object]:
        return [each["samples"] for life in lives for each in life.events("round") if each["contributors"]]

    config = small(island={"accumulate": "auto"})
    with Scarce(rows=2):
        first = train(config, until=3)
    with Scarce(rows=4):
        second = train(config, resume=True)
    whole = train(small(checkpoint={"dir": str(tmp_path / "whole")}))
    assert [life.events("start")[0]["accumulate"] for life in (first, second, whole)] == [4, 2, 1]
    assert samples(first, second) == samples(whole)
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-4)


def test_where_not_one_sample_fits_the_error_says_what_to_change(small):
    with Scarce(rows=0), pytest.raises(DeviceError, match=r"not even one sample of 32 tokens .*checkpointing=true"):
        train(small(island={"accumulate": "auto"}))


def test_another_error_is_no_lack_of_memory(small):
    with Scarce(rows=2, error=RuntimeError("bad shape")), pytest.raises(RuntimeError, match="bad shape"):
        train(small(island={"accumulate": "auto"}))


def test_a_cpu_takes_the_whole_batch_and_says_why(small):
    life = train(small(island={"accumulate": "auto"}, inner={"steps": 3}))
    assert life.events("start")[0]["accumulate"] == 1
    (text,) = said(life)
    assert "a CPU's cannot be tried" in text


def test_a_written_number_is_tried_by_nobody(small):
    with Scarce(rows=8) as scarce:
        life = train(small(island={"accumulate": 2}, inner={"steps": 3}))
    assert scarce.tried == [4] * 6 and said(life) == []


@pytest.mark.parametrize("value", [0, -1, "some", 1.5])
def test_anything_but_auto_or_a_number_is_refused(small, value):
    with pytest.raises(ConfigError, match=r"island\.accumulate=.*write a whole number, 1 or more, or `auto`"):
        small(island={"accumulate": value})


def test_a_batch_must_still_be_divided_among_processes(small):
    with pytest.raises(ConfigError, match=r"island\.accumulate=auto: use a multiple of 3"):
        small(island={"batch": 8, "fsdp": 3, "accumulate": "auto"})
    assert own_island({"island": {"fsdp": 3, "accumulate": "auto"}}).batch == 3  # before it knows the run's


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_with_little_memory_gets_as_much_as_fits(small):
    total = torch.cuda.get_device_properties(0).total_memory
    model = {"preset": "tiny", "blocks": 4, "width": 128, "heads": 4, "feed_forward": 448}
    config = small(
        model=model, data={"sequence": 256}, evaluate={"every": 0},
        island={"batch": 512, "accumulate": "auto", "device": "cuda"},
    )  # fmt: skip
    torch.cuda.set_per_process_memory_fraction(2.5e9 / total)
    try:
        life = train(config)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 < life.events("start")[0]["accumulate"] < 512
    assert "a step did not fit into" in said(life)[0]
    assert life.outcome.finished
