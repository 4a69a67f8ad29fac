"""`make prove`: runs every claim of the project that needs no GPU and prints one table.

    python tests/prove.py --only WORD     the claims whose text contains WORD
    python tests/prove.py --list          all claims
    python tests/prove.py --quick         what `make soak` runs beside its tests: some claims, scaled down

Tests prove what can be proved without a clock; what is timed is proved here and by `diloco bench`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from diloco.bench.report import Check

ROOT = Path(__file__).parent.parent
DILOCO = [sys.executable, "-m", "diloco"]


@dataclass(frozen=True)
class Result:
    what: str
    value: str
    limit: str
    holds: bool


@dataclass(frozen=True)
class Claim:
    text: str
    show: Callable[[], Iterator[Result]]
    show_quick: Callable[[], Iterator[Result]] | None = None  # scaled down, and never a matter of time


def tests(*arguments: str, **environment: str) -> Callable[[], Iterator[Result]]:
    """The claim is what these tests check."""

    def show() -> Iterator[Result]:
        done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], environment)
        summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
        yield Result(" ".join(arguments), summary, "all pass", done.returncode == 0)

    return show


def bench(name: str, *arguments: str) -> Callable[[], Iterator[Result]]:
    """The claim is that every check of this benchmark holds."""

    def show() -> Iterator[Result]:
        done = run([*DILOCO, "bench", name, "--json", *arguments])
        if done.returncode:
            yield Result(f"bench {name}", done.stderr.strip()[-80:], "runs", False)
            return
        for check in (Check(**fields) for fields in json.loads(done.stdout)["checks"]):
            yield Result(check.name, f"{check.value:.4g}", check.bound, check.holds)

    return show


def demo(steps: int, limit_s: float | None) -> Callable[[], Iterator[Result]]:
    """The demo's run falls, ends with what to do next and, if asked, stays below a time."""

    def show() -> Iterator[Result]:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            changes = ["--set", f"checkpoint.dir={folder}/run", "--set", f"inner.steps={steps}"]
            done = run([*DILOCO, "run", "examples/quickstart.yaml", *changes])
            seconds = time.perf_counter() - started
            if done.returncode:
                yield Result("the demo's run", done.stderr.strip()[-80:], "runs", False)
                return
            events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
        losses = [event["validation_loss"] for event in events if event["event"] == "validation"]
        if limit_s is not None:
            yield Result("seconds", f"{seconds:.0f}", f"≤ {limit_s:.0f}", seconds <= limit_s)
        falls = losses[-1] < losses[0] / 1.5
        yield Result("validation loss", f"{losses[0]:.2f} -> {losses[-1]:.2f}", "falls by a third", falls)
        yield Result("last lines", "next:" if "next:" in done.stdout else "nothing", "next:", "next:" in done.stdout)

    return show


def help_is_quick() -> Iterator[Result]:
    run([*DILOCO, "--help"])  # warm the file cache
    times = []
    for _ in range(5):
        started = time.perf_counter()
        run([*DILOCO, "--help"])
        times.append(time.perf_counter() - started)
    yield Result("seconds, median of 5", f"{median(times):.2f}", "< 0.3", median(times) < 0.3)


def sixteen_peers() -> Iterator[Result]:
    """Real processes; later rounds take no memory beyond what the first one took."""
    done = run([*DILOCO, "bench", "allreduce", "--json", "--peers", "16", "--values", "4000000", "--against", "none"])
    if done.returncode:
        yield Result("bench allreduce --peers 16", done.stderr.strip()[-80:], "runs", False)
        return
    row = json.loads(done.stdout)["unshaped"]
    memory, limit = row["memory_growth_bytes"], 50e6
    yield Result("more memory after eleven rounds, MB", f"{memory / 1e6:.0f}", f"≤ {limit / 1e6:.0f}", memory <= limit)


def disasters(seeds: int) -> Callable[[], Iterator[Result]]:
    def show() -> Iterator[Result]:
        jobs = str(os.cpu_count() or 1)
        done = run([*DILOCO, "simulate", "protocol", "--seeds", str(seeds), "--jobs", jobs])
        lines = done.stdout.strip().splitlines()
        yield Result(f"{seeds} seeds", lines[-1] if lines else done.stderr[-80:], "0 violations", done.returncode == 0)

    return show


CLAIMS = [
    Claim("the demo trains in under 3 minutes, with falling loss", demo(300, limit_s=180), demo(75, limit_s=None)),
    Claim("losses do not depend on the mesh", tests("tests/test_mesh.py")),
    Claim("our loop costs at most 3 % over a bare one", bench("overhead")),
    Claim("and with its outer updates, too", bench("overhead", "--rounds")),
    Claim("diloco --help answers at once", help_is_quick),
    Claim("every command has help with an example; help loads no torch", tests("tests", "-k", "help")),
    Claim("bad input is one clear line", tests("tests/test_cli.py", "-k", "bad_input")),
    Claim("a stopped and resumed run equals an uninterrupted one", tests("tests/test_trainer.py", "-k", "resumed")),
    Claim("no p2pd is left behind, however its parent ends", tests("tests/test_comm_directory.py")),
    Claim("codecs: encode speed and bias", bench("codec")),
    Claim("codecs and the mean have the same bits everywhere", tests("tests", "-k", "every_platform or do_not_depend")),
    Claim("a shaped link holds its rate", bench("link")),
    Claim("the all-reduce against hivemind, gloo and the link", bench("allreduce")),
    Claim("sixteen peers in one group", sixteen_peers),
    Claim("cancelled at any moment, an all-reduce leaves nothing behind", tests("tests/test_comm_allreduce.py")),
    Claim("20,000 disasters, and nothing forked, lost or counted twice", disasters(20_000), disasters(40)),
    Claim("each rule closes a hole", tests("tests/test_elastic_simulator.py", "-k", "scenarios or rule")),
    Claim("a killed or stopped island costs the others little", bench("recover")),
    Claim("the dashboard of 64 islands answers at once, and shows in time who is lost", bench("dashboard")),
    Claim("an island that loses a process names it and is back within three rounds", bench("ranks")),
    Claim("a newcomer costs the others nothing, and downloads at the rate of its link", bench("join")),
    Claim("saves cost training nothing, and the log a tenth of snapshots", bench("checkpoint")),
    Claim("a run comes back from a bucket", tests("tests/test_checkpoint_remote.py")),
    Claim("twenty kills in a row; an epoch with crashes and joins",
          tests("tests/test_elastic_kills.py", DILOCO_KILLS="20")),
    Claim("ten minutes of faults of every kind: nothing is lost, rounds go on", bench("soak", "--seed", "1")),
    Claim("a writer killed 300 times loses nothing that was durable",
          tests("tests/test_checkpoint_kills.py", DILOCO_WRITER_KILLS="300")),
    Claim("a run whose islands were all killed goes on from their disks", tests("tests/test_checkpoint_restart.py")),
    Claim("an earlier round of a run becomes a new one", tests("tests/test_rewind.py")),
    Claim("settings change by the owner's signature, at one record for all", tests("tests/test_amend.py")),
    Claim("any changed byte of a log or snapshot is named",
          tests("tests", "-k", "test_checkpoint and changed_byte", DILOCO_FLIPS_VERIFIED="1")),
    Claim("a cut network trains on and merges; liars are excluded by name", tests("tests/test_elastic_driver.py")),
    Claim("every schedule is what a plain loop says", tests("tests/test_algorithms.py", "tests/test_membership.py")),
    Claim("a slow link costs an overlapped loop nothing", bench("overlap")),
    Claim("low communication costs little quality; bytes saved", bench("quality")),
    Claim("the planner says what the published table says", bench("plan", "--no-real"), bench("plan", "--no-real")),
    Claim("the planner says what real islands do", bench("plan")),
    Claim("virtual time says what real islands do", bench("virtual")),
    Claim("any PyTorch loop takes part", tests("tests/test_api.py", "tests/test_api_restart.py")),
    Claim("an exported model is the same model", tests("tests/test_export.py", "tests/test_sample.py")),
    Claim("100,000 mutated inputs for each decoder", tests("tests/test_fuzz.py", DILOCO_FUZZ="100000")),
    Claim("the wheel installs beside Jupyter's comm", tests("tests/test_packaging.py")),
]  # fmt: skip


def run(command: list[str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def arguments() -> Namespace:
    parser = ArgumentParser(description="Run the project's claims and print one table.")
    parser.add_argument("--only", metavar="WORD", default="", help="the claims whose text contains WORD")
    parser.add_argument("--quick", action="store_true", help="some claims, scaled down")
    parser.add_argument("--list", action="store_true", help="the claims, without running them")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    claims = [claim for claim in CLAIMS if asked.only in claim.text]
    if not claims:
        sys.exit(f"no claim contains {asked.only!r}; --list shows them all")
    if asked.list:
        print("\n".join(claim.text for claim in claims))
        return
    console, table, failed = Console(), Table("claim", "measured", "value", "limit", ""), 0
    for claim in claims:
        show = claim.show_quick if asked.quick else claim.show
        if show is not None:
            for number, result in enumerate(show()):
                failed += not result.holds
                verdict = "holds" if result.holds else "FAILS"
                table.add_row(claim.text if number == 0 else "", result.what, result.value, result.limit, verdict)
    console.print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
