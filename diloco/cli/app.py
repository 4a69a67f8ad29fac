"""List all commands. Each is a function with its options and its body in another file, and a line here."""

from typing import Annotated

import typer

from diloco.cli.bench import bench
from diloco.cli.completion import completion
from diloco.cli.dashboard import dashboard, report
from diloco.cli.demo import demo
from diloco.cli.doctor import doctor
from diloco.cli.history import export, log, restore, rewind, sample, set_settings
from diloco.cli.init import init
from diloco.cli.join import join
from diloco.cli.key import key
from diloco.cli.launch import launch
from diloco.cli.owner import evict, force_roster
from diloco.cli.plan import plan
from diloco.cli.prepare import config, tokenize
from diloco.cli.run import run
from diloco.cli.simulate import simulate
from diloco.cli.status import bundle, ls, status, stop, why
from diloco.cli.ticket import ticket
from diloco.version import PROTOCOL, __version__

app = typer.Typer(
    help="Train one large model together on computers that sit far apart.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: loading rich's markdown would take longer than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(asked: bool) -> None:
    """Print the version and exit, if the option was given."""
    if asked:
        print(f"diloco {__version__}, protocol {PROTOCOL}")
        raise typer.Exit


@app.callback()
def diloco(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print version and protocol.")
    ] = False,
) -> None:
    pass


app.command(epilog="Example: diloco demo")(demo)
app.command(epilog="Example: diloco init run.yaml --model tiny --data stdlib --islands 2")(init)
app.command(epilog="Example: diloco run examples/quickstart.yaml --set inner.steps=500")(run)
app.command(epilog="Example: diloco join diloco2-… --max-up 20mbit")(join)
app.command(epilog="Example: diloco launch run.yaml --on slurm --islands 4 --nodes-per-island 2 --gpus-per-node 8")(
    launch
)
app.add_typer(ticket, name="ticket")
app.add_typer(key, name="key")
app.command(epilog="Example: diloco config examples/quickstart.yaml --set inner.lr=1e-3")(config)
app.command(epilog="Example: diloco tokenize docs/ README.md --out data.tokens")(tokenize)
app.command(epilog="Example: diloco export quickstart exported/quickstart")(export)
app.command(epilog="Example: diloco status quickstart")(status)
app.command(epilog="Example: diloco why quickstart")(why)
app.command(epilog="Example: diloco dashboard quickstart")(dashboard)
app.command(epilog="Example: diloco report quickstart")(report)
app.command(epilog="Example: diloco ls")(ls)
app.command(epilog="Example: diloco stop islands")(stop)
app.command(epilog="Example: diloco bundle quickstart")(bundle)
app.command(epilog="Example: diloco log quickstart --checkout 12 out/round-12")(log)
app.command(epilog="Example: diloco restore s3://bucket/runs runs/restored")(restore)
app.command(epilog="Example: diloco rewind quickstart 12 --set inner.lr=1e-4")(rewind)
app.command(epilog="Example: diloco evict islands island-3")(evict)
app.command(epilog="Example: diloco force-roster islands --keep island-1,island-2")(force_roster)
app.command("set", epilog="Example: diloco set islands inner.lr=1e-4 inner.steps=4000")(set_settings)
app.command(epilog='Example: diloco sample quickstart "def main(" --tokens 100')(sample)
app.add_typer(simulate, name="simulate")
app.command(epilog="Example: diloco plan examples/islands.yaml --islands 4 --link 1gbit,40ms --accelerator h100")(plan)
app.command(epilog="Example: diloco doctor runs/islands/ticket --port 31337")(doctor)
app.add_typer(bench, name="bench")
app.command(epilog="Example: diloco completion bash")(completion)
