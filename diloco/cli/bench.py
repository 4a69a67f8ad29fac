"""Declare the options of `diloco bench …`. Each benchmark is a module of the same name in `diloco.bench`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.cli.shared import Device, Json, parse_option, parse_positive
from diloco.units import parse_delay, parse_link, parse_rate

bench = typer.Typer(
    help="Run a benchmark and check it against its limits. --json prints one object: the figures, and `checks`.",
    no_args_is_help=True,
)
Values = Annotated[int, typer.Option(min=1, help="Length of the vector.")]
LADDER = ("1mbit", "10mbit", "100mbit", "1gbit", "2gbit")


def benchmark(example: str) -> Callable[[Callable[..., Mapping[str, Any] | None]], None]:
    """Make a command of a function that declares options; the benchmark of its name measures with them.

    What the function returns replaces the options as they were given. Each command also takes --json.
    """

    def add(declared: Callable[..., Mapping[str, Any] | None]) -> None:
        name = declared.__name__

        def command(*, json: bool, **options: Any) -> None:
            from diloco.bench.report import show

            measure = import_module(f"diloco.bench.{name}").measure
            show(measure(**(declared(**options) or options)), as_json=json)

        flag = inspect.Parameter("json", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=Json)
        parameters = {"json": flag, **inspect.signature(declared).parameters}
        command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        bench.command(name, help=inspect.getdoc(declared), epilog=f"Example: diloco bench {example}")(command)

    return add


@benchmark("overhead --json")
def overhead(
    device: Device = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to measure; both loops take turns.")] = 12,
    rounds: Annotated[bool, typer.Option("--rounds", help="With an outer update after each block of steps.")] = False,
    viewers: Annotated[
        int, typer.Option(min=0, help="Compare instead with and without so many who watch by a ticket.")
    ] = 0,
) -> None:
    """Compare our step time with that of a bare PyTorch loop.

    With --viewers: compare steps while others run `diloco status TICKET --watch` with steps while nobody does.
    """


@benchmark("dashboard --json")
def dashboard(
    islands: Annotated[int, typer.Option(min=2, max=256, help="Islands of the run that is shown.")] = 64,
    rounds: Annotated[int, typer.Option(min=200, help="Rounds that it has behind it.")] = 1000,
) -> None:
    """Use the dashboard in a headless Chromium (two minutes)."""


@benchmark("speed --preset 150m --batch 32 --sequence 1024 --compile")
def speed(
    preset: Annotated[str, typer.Option(help="Model size.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 8,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 128,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 256,
    steps: Annotated[int, typer.Option(min=5, help="Steps to measure, after a warm-up.")] = 30,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    device: Device = "auto",
) -> None:
    """Measure tokens per second and MFU of one process."""


@benchmark("codec --json")
def codec(
    device: Device = "auto",
    values: Annotated[int, typer.Option(min=2, help="Length of the vector.")] = 25_000_000,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed runs of each codec (default 25, on a GPU 200).")
    ] = None,
) -> None:
    """Measure speed, error and bias of each codec (a minute)."""


@benchmark("allreduce --against gloo --link 100mbit,40ms")
def allreduce(
    peers: Annotated[int, typer.Option(min=2, max=64, help="Processes on this machine.")] = 4,
    values: Values = 25_000_000,
    codec: Annotated[
        str, typer.Option(help="A codec that can also carry a mean: not one that needs error feedback.")
    ] = "int8",
    link: Annotated[str, typer.Option(help="Each peer's rate, and one-way delay.")] = "200mbit,20ms",
    against: Annotated[str, typer.Option(help="Compare with hivemind, gloo, both, or none.")] = "hivemind,gloo",
    relay: Annotated[bool, typer.Option("--relay", help="Also through a relay: only one peer can be dialled.")] = False,
) -> Mapping[str, Any]:
    """Let peers average a vector (two minutes).

    The limits are for the default options on an idle machine.
    """
    line = parse_option("--link", link, parse_link)
    others = [] if against == "none" else [name.strip() for name in against.split(",")]
    fixed = {"peers": peers, "values": values, "codec": codec, "link": link}
    return {**fixed, "line": line, "against": others, "relay": relay}


@benchmark("trust --json")
def trust(
    islands: Annotated[int, typer.Option(min=2, max=16, help="Islands in the run.")] = 4,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long their control traffic is counted.")] = 30.0,
    newcomers: Annotated[int, typer.Option(min=1, help="Newcomers with checks, and as many without.")] = 3,
) -> None:
    """Measure what admission costs (a minute)."""


@benchmark("recover --json")
def recover(
    values: Values = 25_000_000,
    silence: Annotated[float, typer.Option(min=0.1, help="Seconds until a silent island counts as lost.")] = 5.0,
    islands: Annotated[int, typer.Option(min=2, max=16, help="Number of islands; only with --link.")] = 4,
    link: Annotated[str | None, typer.Option(help="Each island's rate, and one-way delay (default: unshaped).")] = None,
    into: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of an exchange after which a member is killed, with --link.")
    ] = 0.9,
) -> Mapping[str, Any]:
    """Measure what a lost island costs the others (three minutes).

    One of four islands is killed, later another one is stopped. With --link one is killed late in an exchange, and what
    survivors have to receive again is measured.
    """
    line = None if link is None else parse_option("--link", link, parse_link)
    return {"values": values, "silence_s": silence, "islands": islands, "line": line, "into": into}


@benchmark("ranks --json")
def ranks(
    every: Annotated[float, typer.Option(min=5.0, help="Seconds that islands train between two rounds.")] = 30.0,
    faults: Annotated[int, typer.Option(min=1, max=4, help="Faults in each of the two runs, a rank each.")] = 4,
) -> Mapping[str, Any]:
    """Kill and stop processes inside an island (25 minutes).

    An island of 2 x 2 processes trains among three others, as the founder of the run and as one that joined. Measures
    how soon the process is named, after how many rounds the island contributes again, and what that costs the others.
    """
    return {"every_s": every, "faults": faults}


@benchmark("memory --modes classic --large 50000000")
def memory(
    modes: Annotated[
        str, typer.Option(help="Which of classic, overlapped and streaming.")
    ] = "classic,overlapped,streaming",
    small: Annotated[int, typer.Option(min=1, help="Parameters of the smaller model.")] = 20_000_000,
    large: Annotated[int, typer.Option(min=1, help="Parameters of the larger model.")] = 100_000_000,
    rounds: Annotated[int, typer.Option(min=12, help="Rounds of each run.")] = 20,
) -> Mapping[str, Any]:
    """Measure the memory of an island's outer part (30 minutes).

    Real islands of two sizes train, save, make snapshots and serve a newcomer.
    """
    return {"modes": tuple(modes.split(",")), "small": small, "large": large, "rounds": rounds}


@benchmark("sizes --presets 150m,1b --json")
def sizes(
    presets: Annotated[str, typer.Option(help="Model sizes.")] = "150m",
    outer: Annotated[str, typer.Option(help="Where the outer state lies: host, device, or both.")] = "device,host",
    cases: Annotated[
        str, typer.Option(help="kill: one of two is killed and comes back; window: rounds beside training; alone.")
    ] = "kill,window",
    steps: Annotated[int, typer.Option(min=40, help="Inner steps, but for windows.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 4,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 512,
    snapshots: Annotated[int, typer.Option(min=1, help="Rounds between two snapshots, and two saves.")] = 4,
    device: Device = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Where islands write (default /dev/shm, in memory, where that is there).")
    ] = None,
) -> Mapping[str, Any]:
    """Measure memory and rounds of islands that share a GPU.

    Real islands train together, one of them is killed and comes back; or a round is under way meanwhile.
    """
    names = {"presets": presets, "outers": outer, "cases": cases}
    lists = {name: tuple(each.strip() for each in text.split(",")) for name, text in names.items()}
    sizes = {"steps": steps, "batch": batch, "sequence": sequence, "snapshots": snapshots}
    return {**lists, **sizes, "device": device, "folder": folder}


@benchmark("mesh --json")
def mesh(
    preset: Annotated[str, typer.Option(help="Model size.")] = "150m",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 32,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 1024,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32768,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps to measure; both take turns.")] = 8,
) -> None:
    """Measure what FSDP2 over NCCL costs a step, on one NVIDIA GPU.

    FSDP2 is forced on a mesh of 1 x 1, and the step compiled; it is compared with the same step without FSDP2.
    """


@benchmark("join --json")
def join(
    values: Values = 25_000_000,
    joins: Annotated[int, typer.Option(min=1, help="Newcomers, one after the other.")] = 3,
    rate: Annotated[str, typer.Option(help="Rate of each link while the download is measured.")] = "400mbit",
) -> Mapping[str, Any]:
    """Measure what a newcomer costs, and when it is in (20 minutes).

    Four islands train while it joins.
    """
    return {"values": values, "joins": joins, "bits_per_s": parse_positive("--rate", rate, parse_rate)}


@benchmark("soak --minutes 10 --islands 6 --seed 1 --keep soak-1")
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="For how long faults come.")] = 10.0,
    islands: Annotated[int, typer.Option(min=2, max=32, help="Number of islands at the beginning.")] = 6,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="The faults follow from it.")] = 0,
    partition: Annotated[str, typer.Option(help="elastic.partition: auto, quorum or merge.")] = "auto",
    keep: Annotated[
        Path | None, typer.Option(help="A new folder for report.md, soak.json and all that the islands write.")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Let faults happen.")] = True,
    baseline: Annotated[
        float | None, typer.Option(min=0.0, help="Rounds per second without faults (default: measured first).")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="What cuts the network: netns (root), shaped, or auto for netns where it can be had.")
    ] = "auto",
) -> None:
    """Let real islands suffer faults of every kind (15 minutes).

    Islands are killed, stopped, cut off and slowed down, they leave, join and come back with a wrong clock.
    """


@benchmark("checkpoint --json")
def checkpoint(
    device: Device = "auto",
    blocks: Annotated[int, typer.Option(min=1, help="Number of saves; steps are timed during each.")] = 12,
    values: Annotated[int, typer.Option(min=1, help="Length of the vector whose log is counted.")] = 2_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of that log.")] = 20,
) -> None:
    """Measure what saves and snapshots cost (three minutes).

    Also counts the bytes of the log.
    """


@benchmark("virtual --json")
def virtual() -> None:
    """Check virtual time by real islands, and let a thousand fail."""


@benchmark("mutants --jobs 8 --json")
def mutants(
    seed: Annotated[int | None, typer.Option(help="Draws the mutants (default today's date, as 20251231).")] = None,
    count: Annotated[int, typer.Option(min=1, help="Mutants to draw, and a third as many of the finer kinds.")] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="Disasters that each mutant has to survive.")] = 500,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Break the protocol, and count what the simulator notices.

    Each mutant has one change of the protocol core, generated from its source: a condition negated, a durable write
    left out, a function that returns at once; and, beside these, a comparison moved by one or a call left out. It is
    caught by a scenario that goes otherwise, or by a disaster of `diloco simulate protocol` that violates an invariant,
    raises an error or hangs. One that survives all disasters takes minutes. Needs a checkout, for its scenarios.
    """


@benchmark("overlap --json")
def overlap(
    islands: Annotated[
        int, typer.Option(min=2, help="Islands, each with one thread: no more than there are cores.")
    ] = 2,
    every: Annotated[int, typer.Option(min=2, help="Inner steps between two rounds.")] = 30,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds to measure.")] = 16,
) -> None:
    """Measure what overlap saves on a slow link (seven minutes).

    One loop waits for its rounds, the other one trains while they are under way.
    """


@benchmark("plan --json")
def plan(
    real: Annotated[bool, typer.Option("--real/--no-real", help="Also compare with islands that train here.")] = True,
) -> None:
    """Compare the planner with real islands (three minutes).

    Also compares it with the published table of bandwidth and utilisation.
    """


@benchmark("quality --variant int8,sparse --seeds 1 --plot quality.png")
def quality(
    preset: Annotated[str, typer.Option(help="The model: tiny, 35m, 90m, …")] = "tiny",
    islands: Annotated[int, typer.Option(min=2, help="Number of islands.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Global batch: samples per step, all islands.")] = 16,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 32,
    every: Annotated[int, typer.Option(min=1, help="Inner steps between two rounds.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each island.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 3,
    variant: Annotated[str, typer.Option(help="int8, streaming fp4, eager int8, sparse, …; with commas.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the losses.")] = None,
    bytes_too: Annotated[bool, typer.Option("--bytes/--no-bytes", help="Count the bytes sent, too.")] = True,
    baselines: Annotated[bool, typer.Option(help="Also train data parallel, and one island alone.")] = True,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak inner learning rate, the same for all.")] = 4e-4,
    outer_lr: Annotated[str, typer.Option(help="Outer learning rate: a number, or auto.")] = "0.7",
    momentum: Annotated[str, typer.Option(help="Outer momentum: a number, or auto.")] = "0.7",
    text: Annotated[
        Path | None, typer.Option(help="Text to train on, as bytes (default Python's standard library).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; islands share one GPU.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
) -> Mapping[str, Any]:
    """Compare DiLoCo's variants with data parallel (25 minutes).

    All of them train on the same tokens. The duration is that on two CPU cores.
    """
    from diloco.bench.quality import DEFAULT, QualityConfig

    names = tuple(name.strip() for name in variant.split(",")) if variant else DEFAULT
    data = {"sequence": sequence} | ({"source": "text", "path": str(text)} if text else {})
    setting = QualityConfig(
        {"preset": preset}, data, {"device": device, "compile": compile}, {"lr": lr, "warmup": max(1, steps // 20)},
        {"lr": outer_lr, "momentum": momentum}, islands=islands, batch=batch, every=every, steps=steps, seeds=seeds,
        variants=names, baselines=baselines, log_every=1 if device == "cpu" else 50,
    )  # fmt: skip
    return {"setting": setting, "plot": plot, "bytes_too": bytes_too}


@benchmark("link --rate 200mbit --delay 20ms")
def link(
    rate: Annotated[
        list[str] | None,
        typer.Option(help="A rate to hold; can be repeated, or use commas (default from 1mbit to 2gbit)."),
    ] = None,
    delay: Annotated[str, typer.Option(help="One-way delay between the two processes.")] = "20ms",
    streams: Annotated[int, typer.Option(min=1, max=64, help="Streams that share the link.")] = 4,
) -> Mapping[str, Any]:
    """Measure how well an emulated link holds its rate and delay."""
    delay_s = parse_option("--delay", delay, parse_delay)
    return {"rates": parse_rates(rate or LADDER), "delay_s": delay_s, "streams": streams}


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Parse texts such as `1mbit,10mbit` and `1gbit` into bits per second, by what was written."""
    names = [part.strip() for text in texts for part in text.split(",")]
    return {name: parse_positive("--rate", name, parse_rate) for name in names}
