"""`diloco bench …`: each command a few lines over the function that measures."""

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    help="Measure. With --json: one object with `checks`, next to the raw figures.", no_args_is_help=True
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@bench.command(epilog="Example: diloco bench overhead --json")
def overhead(
    json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Alternating blocks of each loop.")] = 12,
    rounds: Annotated[bool, typer.Option("--rounds", help="With an outer update after each block of steps.")] = False,
) -> None:
    """Our step time over a bare PyTorch loop's."""
    from diloco.bench.overhead import measure
    from diloco.bench.report import show

    show(measure(device=device, blocks=blocks, rounds=rounds), as_json=json)


@bench.command(epilog="Example: diloco bench speed --preset 150m --batch 32 --sequence 1024 --compile")
def speed(
    json: Json = False,
    preset: Annotated[str, typer.Option(help="Model size.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Samples a step.")] = 8,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens a sample.")] = 128,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 256,
    steps: Annotated[int, typer.Option(min=5, help="Steps to measure, after a warm-up.")] = 30,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Tokens a second and MFU of one process."""
    from diloco.bench.report import show
    from diloco.bench.speed import measure

    show(
        measure(
            preset=preset, batch=batch, sequence=sequence, vocab=vocab, steps=steps, compile=compile, device=device
        ),
        as_json=json,
    )


@bench.command(epilog="Example: diloco bench codec --json")
def codec(
    json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    values: Annotated[int, typer.Option(min=2, help="Length of the vector.")] = 25_000_000,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed runs of each, of which the median counts: 25, or 200 on a GPU.")
    ] = None,
) -> None:
    """Speed, error and bias of each codec (a minute)."""
    from diloco.bench.codec import measure
    from diloco.bench.report import show

    show(measure(device=device, count=values, repeats=repeats), as_json=json)


@bench.command(epilog="Example: diloco bench allreduce --against gloo --link 100mbit,40ms")
def allreduce(
    json: Json = False,
    peers: Annotated[int, typer.Option(min=2, max=64, help="Processes on this machine.")] = 4,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector.")] = 25_000_000,
    codec: Annotated[str, typer.Option(help="fp32, bf16, int8, int4 or fp4.")] = "int8",
    link: Annotated[str, typer.Option(help="Each peer's rate, and one-way delay.")] = "200mbit,20ms",
    against: Annotated[str, typer.Option(help="hivemind, gloo, both with a comma, or none.")] = "hivemind,gloo",
) -> None:
    """Peers average a vector (two minutes). The limits are for the default options on an idle machine."""
    from diloco.bench.allreduce import measure
    from diloco.bench.report import show

    show(measure(peers=peers, count=values, codec=codec, link=link, against=against), as_json=json)


@bench.command(epilog="Example: diloco bench recover --json")
def recover(
    json: Json = False,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector.")] = 25_000_000,
    silence: Annotated[float, typer.Option(min=0.1, help="Seconds until a silent island counts as lost.")] = 5.0,
) -> None:
    """What a killed or stopped island costs the other three (three minutes)."""
    from diloco.bench.recover import measure
    from diloco.bench.report import show

    show(measure(values=values, silence_s=silence), as_json=json)


@bench.command(name="join", epilog="Example: diloco bench join --json")
def bench_join(
    json: Json = False,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector.")] = 25_000_000,
    joins: Annotated[int, typer.Option(min=1, help="Newcomers, one after the other.")] = 3,
    rate: Annotated[str, typer.Option(help="Of each link, when the download itself is measured.")] = "400mbit",
) -> None:
    """What a newcomer costs four islands that train, and what it downloads (eight minutes)."""
    from diloco.bench.join import measure
    from diloco.bench.report import show

    show(measure(values=values, joins=joins, rate=rate), as_json=json)


@bench.command(name="checkpoint", epilog="Example: diloco bench checkpoint --json")
def bench_checkpoint(
    json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Saves, with steps during and after each.")] = 12,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector whose log is counted.")] = 2_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Of that log.")] = 20,
) -> None:
    """What saves and snapshots cost training, and the bytes of the log (three minutes)."""
    from diloco.bench.checkpoint import measure
    from diloco.bench.report import show

    show(measure(device=device, blocks=blocks, values=values, rounds=rounds), as_json=json)


@bench.command(epilog="Example: diloco bench virtual --json")
def virtual(json: Json = False) -> None:
    """Virtual time against four real islands on shaped links (a minute)."""
    from diloco.bench.report import show
    from diloco.bench.virtual import measure

    show(measure(), as_json=json)


@bench.command(epilog="Example: diloco bench overlap --json")
def overlap(
    json: Json = False,
    islands: Annotated[int, typer.Option(min=2, help="Each with one thread: no more than there are cores.")] = 2,
    every: Annotated[int, typer.Option(min=2, help="Inner steps between two rounds.")] = 30,
    rounds: Annotated[int, typer.Option(min=5, help="That are measured.")] = 16,
) -> None:
    """What a slow link costs a loop that waits for its rounds, and one that goes on (seven minutes)."""
    from diloco.bench.overlap import measure
    from diloco.bench.report import show

    show(measure(islands=islands, every=every, rounds=rounds), as_json=json)


@bench.command(name="plan", epilog="Example: diloco bench plan --json")
def bench_plan(
    json: Json = False,
    real: Annotated[bool, typer.Option("--real/--no-real", help="Also against islands that train here.")] = True,
) -> None:
    """The planner against the published table, and against real islands over slow links (three minutes)."""
    from diloco.bench.plan import measure
    from diloco.bench.report import show

    show(measure(real=real), as_json=json)


@bench.command(epilog="Example: diloco bench quality --variant int8,sparse --seeds 1 --plot quality.png")
def quality(
    json: Json = False,
    preset: Annotated[str, typer.Option(help="The model: tiny, 35m, 90m, …")] = "tiny",
    islands: Annotated[int, typer.Option(min=2)] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step of all islands together.")] = 16,
    sequence: Annotated[int, typer.Option(min=1)] = 32,
    every: Annotated[int, typer.Option(min=1, help="Inner steps between two rounds.")] = 30,
    steps: Annotated[int, typer.Option(min=1)] = 600,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    variant: Annotated[str, typer.Option(help="With commas; int8, int4, streaming fp4, eager int8, sparse, …")] = "",
    plot: Annotated[Path | None, typer.Option(help="A PNG of the losses.")] = None,
    bytes_too: Annotated[bool, typer.Option("--bytes/--no-bytes", help="Count what is sent, too.")] = True,
    baselines: Annotated[bool, typer.Option(help="Data parallel, and one island alone.")] = True,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak inner learning rate, the same for all.")] = 4e-4,
    outer_lr: Annotated[str, typer.Option(help="A number, or auto.")] = "0.7",
    momentum: Annotated[str, typer.Option(help="Outer momentum: a number, or auto.")] = "0.7",
    text: Annotated[Path | None, typer.Option(help="To train on, as bytes; none: Python's standard library.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; islands share one GPU.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile")] = False,
) -> None:
    """DiLoCo's variants against data parallel on the same tokens (25 minutes on two cores)."""
    from diloco.bench.quality import DEFAULT, Setting, measure
    from diloco.bench.report import show

    names = tuple(name.strip() for name in variant.split(",")) if variant else DEFAULT
    data = {"sequence": sequence} | ({"source": "text", "path": str(text)} if text else {})
    setting = Setting(
        {"preset": preset}, data, {"device": device, "compile": compile}, {"lr": lr, "warmup": max(1, steps // 20)},
        {"lr": outer_lr, "momentum": momentum}, islands=islands, batch=batch, every=every, steps=steps, seeds=seeds,
        variants=names, baselines=baselines, log_every=1 if device == "cpu" else 50,
    )  # fmt: skip
    show(measure(setting, plot=plot, bytes_too=bytes_too), as_json=json)


@bench.command(epilog="Example: diloco bench link --rate 200mbit --delay 20ms")
def link(
    json: Json = False,
    rate: Annotated[
        list[str] | None, typer.Option(help="To be held; repeat it or use commas. None: from 1mbit to 2gbit.")
    ] = None,
    delay: Annotated[str, typer.Option(help="One way, between the two processes.")] = "20ms",
    streams: Annotated[int, typer.Option(min=1, max=64, help="Streams that share the link.")] = 4,
) -> None:
    """How well an emulated link holds its rate and delay."""
    from diloco.bench.link import LADDER, measure
    from diloco.bench.report import show

    show(measure(rates=rate or LADDER, delay=delay, streams=streams), as_json=json)
