"""All commands, each a few lines over the function that does the work."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.bench import bench
from diloco.version import __version__

app = typer.Typer(
    help="Train one large model together on computers that sit far apart.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: loading rich's markdown would take longer than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set sync.every=100")
]

Link = Annotated[str | None, typer.Option(help="Emulate a link of this rate and one-way delay: 100mbit,40ms")]
FAULTS = ("kill", "stop", "cut", "join", "slow")
Host = Annotated[
    str | None, typer.Option(help="The address at which others reach this machine. None: this machine only.")
]


def _version(asked: bool) -> None:
    if asked:
        print(f"diloco {__version__}")
        raise typer.Exit


@app.callback()
def diloco(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: diloco run examples/quickstart.yaml --set inner.steps=500")
def run(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what the run's folder holds.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again; an earlier run is kept as NAME.1, NAME.2, …")
    ] = False,
    islands: Annotated[
        int | None, typer.Option(min=1, max=64, help="Found a run that others can join, with so many islands here.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="With --islands: start islands again that die.")
    ] = True,
    link: Link = None,
    host: Host = None,
) -> None:
    """Train here. Ctrl-C finishes the step, saves, and says how to go on.

    With --islands, others join with the ticket that is printed: diloco join TICKET. The processes of island.fsdp and
    island.tp are started here; on several machines: torchrun --nnodes 2 … -m diloco run CONFIG
    """
    from diloco.cli.run import islands_command, run_command

    if islands is None:
        run_command(config, set_ or [], link=link, host=host, resume=resume, fresh=fresh, restart=restart)
    else:
        islands_command(config, set_ or [], islands, link=link, host=host, resume=resume, fresh=fresh, restart=restart)


@app.command(epilog="Example: diloco join diloco1-… --max-up 20mbit")
def join(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The run's ticket, or a file that holds it.")],
    set_: Overrides = None,
    dir: Annotated[Path | None, typer.Option(help="This island's folder; runs/RUN-NAME if not given.")] = None,
    name: Annotated[str | None, typer.Option(help="How others see this island.")] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="Processes that share parameters and data.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Processes that share each matrix.")] = None,
    max_up: Annotated[str | None, typer.Option(help="Cap on what is sent: 20mbit.")] = None,
    max_down: Annotated[str | None, typer.Option(help="Cap on what is received.")] = None,
    link: Link = None,
    host: Host = None,
) -> None:
    """Join a run as a peer. Its configuration and its state come from the other islands.

    Ctrl-C contributes what was trained so far, says goodbye and leaves; once more leaves at once.
    """
    from diloco.cli.join import join_command

    mesh = [f"island.{key}={value}" for key, value in (("fsdp", fsdp), ("tp", tp)) if value is not None]
    own = [*(set_ or []), *mesh]
    join_command(ticket, own, dir=dir, name=name, max_up=max_up, max_down=max_down, link=link, host=host)


@app.command(epilog="Example: diloco config examples/quickstart.yaml --set inner.lr=1e-3")
def config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file; none: the defaults.")] = None,
    set_: Overrides = None,
) -> None:
    """Print every setting of a run with its meaning."""
    from diloco.config.file import load_config, render_config

    print(render_config(load_config(config, set_ or [])), end="")


@app.command(epilog="Example: diloco tokenize docs/ notes.txt --out data.tokens --tokenizer path/to/tokenizer")
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Text files or folders.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The token file to write.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or the folder of a Hugging Face tokenizer.")] = "bytes",
    raw: Annotated[str | None, typer.Option(help="The input is one headerless token file: uint16 or uint32.")] = None,
    vocab: Annotated[int | None, typer.Option(help="With --raw: size of its vocabulary.")] = None,
) -> None:
    """Turn text into a token file.

    Also a headerless token file with --raw. Train on it with data: {source: tokens, path: …}
    """
    from diloco.cli.tokenize import tokenize_command

    tokenize_command(inputs, out, tokenizer, raw, vocab)


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name under runs/, or one of its islands' folders.")
]
RunTokenizer = Annotated[
    str | None, typer.Option(help="Its tokenizer, where the run's token file does not say: `bytes` or a folder.")
]


@app.command(epilog="Example: diloco export quickstart exported/quickstart")
def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    tokenizer: RunTokenizer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote to OUT.")] = False,
) -> None:
    """Write a run's outer parameters as a Hugging Face model.

    Of the newest save, with config and tokenizer; the run may go on meanwhile.
    """
    from diloco.cli.export import export_command

    export_command(run, out, tokenizer=tokenizer, force=force)


@app.command(epilog="Example: diloco log islands --checkout 12 out/round-12")
def log(
    run: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, replay, compare all digests.")] = False,
    checkout: Annotated[
        tuple[int, Path] | None,
        typer.Option("--checkout", metavar="ROUND OUT", help="Write the state after this round to a new folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The rounds of a run with others: who contributed, tokens, bytes, digests.

    With --verify, anything that is damaged is named and the exit code is 1; the run may go on meanwhile.
    """
    from diloco.cli.log import log_command

    log_command(run, check=verify, out=checkout, as_json=json)


@app.command(epilog="Example: diloco restore s3://bucket/runs runs/restored")
def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="What checkpoint.remote was, or a run's folder there.")],
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.", show_default=False)],
) -> None:
    """Bring back what a run with others has copied to checkpoint.remote: its newest snapshot, and the log since.

    Every byte is checked. Keys are never copied: take part again with a ticket, or go on as a new run by diloco rewind.
    """
    from diloco.cli.restore import restore_command

    restore_command(url, dir)


@app.command(epilog="Example: diloco rewind quickstart 12 --set inner.lr=1e-4")
def rewind(
    run: RunName,
    round: Annotated[int, typer.Argument(metavar="ROUND", min=0, help="diloco log lists them.", show_default=False)],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The new run's folder; RUN-round-ROUND if not given.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Start a new run from an earlier round of one with others.

    With its parameters, momentum, clock and consumed samples, and with other settings where --set gives them. The old
    run stays as it is.
    """
    from diloco.cli.rewind import rewind_command

    rewind_command(run, round, out, set_ or [])


@app.command(name="set", epilog="Example: diloco set quickstart inner.lr=1e-4 inner.steps=4000")
def set_settings(
    run: RunName,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="What changes.", show_default=False)],
) -> None:
    """Change settings of a run with others while it goes on, or before it is resumed.

    Signed with the key of its owner, in the folder in which it was founded. A round makes the change hold for every
    island at once; diloco log shows which.
    """
    from diloco.cli.set import set_command

    set_command(run, changes)


@app.command(epilog='Example: diloco sample quickstart "def main(" --tokens 100')
def sample(
    run: RunName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="How the text begins.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="How many to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Lower is safer; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many of the likeliest; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Another one, another text.")] = 0,
    tokenizer: RunTokenizer = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Continue a text with a run's outer parameters.

    Of the newest save; the run may go on meanwhile. The text ends early where the model ends the document.
    """
    from diloco.cli.sample import sample_command
    from diloco.history.sample import Choice

    choice = Choice(temperature, top_k, seed)
    sample_command(run, prompt, tokens=tokens, choice=choice, tokenizer=tokenizer, device=device)


@app.command(
    epilog="Example: diloco simulate examples/islands.yaml --islands 4 --link 20mbit,80ms --kill 3@20s   "
    "Another: diloco simulate --protocol --seeds 1000 --jobs 8"
)
def simulate(
    context: typer.Context,
    config: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CONFIG]…", help="The run's YAML file; several are compared.", show_default=False),
    ] = None,
    set_: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, help="From the beginning. None: 4.")] = None,
    link: Annotated[str | None, typer.Option(help="Of each island: rate and one-way delay, 20mbit,80ms")] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Instead: a file with regions, islands and paths; see examples/topology.yaml")
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(help="Island 1 at 60 s, with SIGKILL: 1@60s")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="It does nothing for a while: 2@30s..45s")] = None,
    cut: Annotated[list[str] | None, typer.Option(help="Regions or islands, from each other: eu|us@90s..120s")] = None,
    join_: Annotated[list[str] | None, typer.Option("--join", help="One more island at 100 s: 1@100s")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="Steps of island 3 take 2.5 times as long: 3x2.5")] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Islands that are killed start again.")
    ] = True,
    backend: Annotated[
        str, typer.Option(help="shaped: by the islands themselves; netns: by Linux's kernel, for root.")
    ] = "shaped",
    report: Annotated[
        Path | None, typer.Option(help="The page to write, and a .json beside it; report.html in the run's folder.")
    ] = None,
    protocol: Annotated[bool, typer.Option("--protocol", help="The round protocol alone, with random faults.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --protocol: how many disasters.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="… the first one's seed.")] = 0,
    without: Annotated[
        str | None, typer.Option(metavar="RULE", help="… a rule to switch off, to see what it is for.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="… processes.")] = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Up to 10000 modelled islands: the protocol in virtual time.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=1, help="With --virtual: how long, in virtual time.")] = 30,
    mtbf: Annotated[str | None, typer.Option(help="… an island fails so often, on average: 1min")] = None,
    back: Annotated[str, typer.Option(help="… and is back after so long.")] = "5min",
    silence: Annotated[str, typer.Option(help="… elastic.silence_s: longer than it takes to tell all islands.")] = "5s",
    diurnal: Annotated[str | None, typer.Option(help="… of a link is lost at the worst time of its day: 50%")] = None,
    params: Annotated[str, typer.Option(help="… values in a round.")] = "150M",
    codec: Annotated[str, typer.Option(help="… how they travel.")] = "int8",
    phase: Annotated[str, typer.Option(help="… computing between two rounds.")] = "5min",
    two_level: Annotated[
        bool | None,
        typer.Option("--two-level/--one-level", help="… reduce in groups first. None: more than 64 do."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="… print one JSON object.")] = False,
) -> None:
    """Real islands on this machine over slow links, with faults by a script, and a report with plots.

    Times count from the moment when all islands train. Islands are numbered from 1; those that join later have the
    last numbers. Options for faults can be repeated. An earlier run of that name is kept as NAME.1, NAME.2, …

    With --protocol: the round protocol alone on a virtual network, with random faults; every invariant is checked. A
    violation is printed with its seed, its shortest transcript and how to see it again; the exit code is then 1.

    With --virtual: the same protocol with modelled computers and links, for many islands that come and go: times of
    rounds, utilisation, bytes, messages; every invariant is checked. Then what is computed for other numbers of them.
    """
    from diloco.cli.modes import refuse_misplaced

    refuse_misplaced(context, virtual=virtual, protocol=protocol)
    if virtual:
        from diloco.cli.virtual import Virtual, virtual_command

        modelled = Virtual(islands, link, params, codec, phase, minutes, mtbf, back, silence, diurnal, two_level, first)
        virtual_command(modelled, as_json=json)
        return
    from diloco.cli.simulate import Given, protocol_command, simulate_command

    if protocol:
        protocol_command(seeds=seeds, first=first, islands=islands, without=without, jobs=jobs)
        return
    faults = {name: tuple(texts or ()) for name, texts in zip(FAULTS, (kill, stop, cut, join_, slow), strict=True)}
    given = Given(islands, link, topology, **faults)
    simulate_command(config or [], set_ or [], given, report=report, restart=restart, backend=backend)


@app.command(epilog="Example: diloco plan examples/islands.yaml --islands 4 --link 1gbit,40ms --accelerator h100")
def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.", show_default=False)
    ] = None,
    set_: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, max=1024, help="How many take part.")] = None,
    link: Annotated[str | None, typer.Option(help="Of each island: rate and one-way delay, 1gbit,40ms")] = None,
    max_up: Annotated[str | None, typer.Option(help="Less than that is sent: 110mbit.")] = None,
    max_down: Annotated[str | None, typer.Option(help="Less than that is received.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="h100, h200, a100, 4090, cpu, …")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Instead: the JSON of bench speed; of bench codec, too. Repeat it.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Utilisation to reach, with commas: 95%")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    layers: Annotated[str | None, typer.Option(help="Without CONFIG: transformer blocks.")] = None,
    step_time: Annotated[str | None, typer.Option(help="… what a step takes: 0.1s")] = None,
    params: Annotated[str | None, typer.Option(help="… parameters: 1B")] = None,
    every: Annotated[str | None, typer.Option(help="… steps between two synchronisations; 100.")] = None,
    method: Annotated[str | None, typer.Option(help="… data-parallel, diloco, streaming or overlap.")] = None,
    bits: Annotated[str | None, typer.Option(help="… of a parameter on its way; 16.")] = None,
) -> None:
    """What a slow network will cost, before paying for it.

    Of a CONFIG: seconds, bytes, utilisation and memory, and which setting these links want. --target alone: which
    rate is needed. Without CONFIG: Gbit/s by the model of the Streaming DiLoCo paper, from --layers and so on.
    """
    from diloco.cli.plan import Bare, Links, plan_command

    bare = Bare(layers, step_time, params, every, method, bits)
    links = Links(islands, link, max_up, max_down, accelerator, profile or [])
    plan_command(config, set_ or [], bare, links, target=target, as_json=json)


@app.command(epilog="Example: diloco doctor --dir /scratch/runs")
def doctor(
    dir: Annotated[Path, typer.Option(help="Where runs will be kept.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this machine can do, and what is missing."""
    from diloco.cli.doctor import doctor_command

    doctor_command(dir, as_json=json)


app.add_typer(bench, name="bench")
