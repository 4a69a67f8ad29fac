"""`diloco bench …`: each benchmark's options and one call of the function that measures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Device, Json

if TYPE_CHECKING:
    from diloco.bench.report import Report

bench = typer.Typer(
    help="Run a benchmark and check it against its limits. With --json: one object with `checks`, next to the figures.",
    no_args_is_help=True,
)
Values = Annotated[int, typer.Option(min=1, help="Length of the vector.")]


def show(report: "Report", *, as_json: bool) -> None:
    from diloco.bench.report import show

    show(report, as_json=as_json)


@bench.command(epilog="Example: diloco bench overhead --json")
def overhead(
    json: Json = False,
    device: Device = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Alternating blocks of each loop.")] = 12,
    rounds: Annotated[bool, typer.Option("--rounds", help="With an outer update after each block of steps.")] = False,
) -> None:
    """Compare our step time with that of a bare PyTorch loop."""
    from diloco.bench.overhead import measure

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
    device: Device = "auto",
) -> None:
    """Measure tokens a second and MFU of one process."""
    from diloco.bench.speed import measure

    report = measure(
        preset=preset, batch=batch, sequence=sequence, vocab=vocab, steps=steps, compile=compile, device=device
    )
    show(report, as_json=json)


@bench.command(epilog="Example: diloco bench codec --json")
def codec(
    json: Json = False,
    device: Device = "auto",
    values: Annotated[int, typer.Option(min=2, help="Length of the vector.")] = 25_000_000,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed runs of each, of which the median counts: 25, or 200 on a GPU.")
    ] = None,
) -> None:
    """Measure speed, error and bias of each codec (a minute)."""
    from diloco.bench.codec import measure

    show(measure(device=device, count=values, repeats=repeats), as_json=json)


@bench.command(epilog="Example: diloco bench allreduce --against gloo --link 100mbit,40ms")
def allreduce(
    json: Json = False,
    peers: Annotated[int, typer.Option(min=2, max=64, help="Processes on this machine.")] = 4,
    values: Values = 25_000_000,
    codec: Annotated[str, typer.Option(help="fp32, bf16, int8, int4 or fp4.")] = "int8",
    link: Annotated[str, typer.Option(help="Each peer's rate, and one-way delay.")] = "200mbit,20ms",
    against: Annotated[str, typer.Option(help="hivemind, gloo, both with a comma, or none.")] = "hivemind,gloo",
) -> None:
    """Let peers average a vector (two minutes).

    The limits are for the default options on an idle machine.
    """
    from diloco.bench.allreduce import measure

    show(measure(peers=peers, count=values, codec=codec, link=link, against=against), as_json=json)


@bench.command(epilog="Example: diloco bench recover --json")
def recover(
    json: Json = False,
    values: Values = 25_000_000,
    silence: Annotated[float, typer.Option(min=0.1, help="Seconds until a silent island counts as lost.")] = 5.0,
) -> None:
    """Measure what a lost island costs the others (three minutes).

    One of four islands is killed, later another one is stopped.
    """
    from diloco.bench.recover import measure

    show(measure(values=values, silence_s=silence), as_json=json)


@bench.command(name="join", epilog="Example: diloco bench join --json")
def bench_join(
    json: Json = False,
    values: Values = 25_000_000,
    joins: Annotated[int, typer.Option(min=1, help="Newcomers, one after the other.")] = 3,
    rate: Annotated[str, typer.Option(help="Rate of each link while the download is measured.")] = "400mbit",
) -> None:
    """Measure what a newcomer costs and downloads (eight minutes).

    Four islands train meanwhile.
    """
    from diloco.bench.join import measure

    show(measure(values=values, joins=joins, rate=rate), as_json=json)


@bench.command(name="checkpoint", epilog="Example: diloco bench checkpoint --json")
def bench_checkpoint(
    json: Json = False,
    device: Device = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Saves, with steps during and after each.")] = 12,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector whose log is counted.")] = 2_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of that log.")] = 20,
) -> None:
    """Measure what saves and snapshots cost (three minutes).

    Counts the bytes of the log, too.
    """
    from diloco.bench.checkpoint import measure

    show(measure(device=device, blocks=blocks, values=values, rounds=rounds), as_json=json)


@bench.command(epilog="Example: diloco bench virtual --json")
def virtual(json: Json = False) -> None:
    """Compare virtual time with four real islands (a minute)."""
    from diloco.bench.virtual import measure

    show(measure(), as_json=json)


@bench.command(epilog="Example: diloco bench overlap --json")
def overlap(
    json: Json = False,
    islands: Annotated[
        int, typer.Option(min=2, help="Islands, each with one thread: no more than there are cores.")
    ] = 2,
    every: Annotated[int, typer.Option(min=2, help="Inner steps between two rounds.")] = 30,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds to measure.")] = 16,
) -> None:
    """Measure what overlap saves on a slow link (seven minutes).

    One loop waits for its rounds, the other one goes on meanwhile.
    """
    from diloco.bench.overlap import measure

    show(measure(islands=islands, every=every, rounds=rounds), as_json=json)


@bench.command(name="plan", epilog="Example: diloco bench plan --json")
def bench_plan(
    json: Json = False,
    real: Annotated[bool, typer.Option("--real/--no-real", help="Also compare with islands that train here.")] = True,
) -> None:
    """Compare the planner with real islands (three minutes).

    And with the published table.
    """
    from diloco.bench.plan import measure

    show(measure(real=real), as_json=json)


@bench.command(epilog="Example: diloco bench quality --variant int8,sparse --seeds 1 --plot quality.png")
def quality(
    json: Json = False,
    preset: Annotated[str, typer.Option(help="The model: tiny, 35m, 90m, …")] = "tiny",
    islands: Annotated[int, typer.Option(min=2, help="Number of islands.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step of all islands together.")] = 16,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens a sample.")] = 32,
    every: Annotated[int, typer.Option(min=1, help="Inner steps between two rounds.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each island.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 3,
    variant: Annotated[str, typer.Option(help="With commas; int8, int4, streaming fp4, eager int8, sparse, …")] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the losses.")] = None,
    bytes_too: Annotated[bool, typer.Option("--bytes/--no-bytes", help="Count what is sent, too.")] = True,
    baselines: Annotated[bool, typer.Option(help="Also train data parallel, and one island alone.")] = True,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak inner learning rate, the same for all.")] = 4e-4,
    outer_lr: Annotated[str, typer.Option(help="A number, or auto.")] = "0.7",
    momentum: Annotated[str, typer.Option(help="Outer momentum: a number, or auto.")] = "0.7",
    text: Annotated[
        Path | None, typer.Option(help="Text to train on, as bytes (default Python's standard library).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; islands share one GPU.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
) -> None:
    """Compare DiLoCo's variants with data parallel (25 minutes).

    All train on the same tokens; the time is that of two cores.
    """
    from diloco.bench.quality import DEFAULT, Setting, measure

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
        list[str] | None,
        typer.Option(help="A rate to hold; can be repeated, or use commas (default from 1mbit to 2gbit)."),
    ] = None,
    delay: Annotated[str, typer.Option(help="One-way delay between the two processes.")] = "20ms",
    streams: Annotated[int, typer.Option(min=1, max=64, help="Streams that share the link.")] = 4,
) -> None:
    """Measure how well an emulated link holds its rate and delay."""
    from diloco.bench.link import LADDER, measure

    show(measure(rates=rate or LADDER, delay=delay, streams=streams), as_json=json)
