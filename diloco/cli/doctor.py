"""Declare `diloco doctor`: what this machine can do, what is missing, and how to mend it.

Every check really does the thing (opens the port, starts the daemon) and returns findings.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.resources
import ipaddress
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from diloco.cli.shared import JoinHost, Json, Port
from diloco.units import counted, format_size

TESTED_TORCH = ("2.11", "2.13")
HIVEMIND = "1.1.12"
EXTRAS = {
    "transformers": "hf", "datasets": "hf", "lightning": "lightning", "tensorboard": "tensorboard", "wandb": "wandb",
}  # fmt: skip
RELEASE_YEAR = 2026
MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "bad": "[red]✗[/]"}

# libp2p opens a socket per connection, and every island a few streams to every other.
OPEN_FILES = 4096

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """Hold one line of the report.

    `mend` is what to type or do; a missing optional extra has one although its state is "ok".
    """

    name: str
    state: State
    detail: str
    mend: str | None = None


Check = Callable[[], Iterator[Finding]]


def doctor(
    ticket: Annotated[
        str | None, typer.Argument(metavar="[TICKET]", help="Try how far one gets into this run, without joining it.")
    ] = None,
    dir: Annotated[Path, typer.Option(help="Where runs, or with a ticket this island, will be kept.")] = Path("runs"),
    host: JoinHost = None,
    port: Port = None,
    json: Json = False,
) -> None:
    """Check what this machine can do, and what is missing."""
    if ticket is None:
        findings = examine(dir)
    else:
        from diloco.cli.reach import examine_way

        findings = examine_way(ticket, dir, host, port or 0)
    show(findings, as_json=json)
    sys.exit(any(finding.state == "bad" for finding in findings))


def show(findings: list[Finding], *, as_json: bool) -> None:
    """Print the findings as a table with marks and advice, or as a JSON list."""
    from rich.markup import escape
    from rich.table import Table

    from diloco.report.console import table_console

    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        advice = f"\n[dim]-> {escape(finding.mend)}[/]" if finding.mend else ""
        table.add_row(MARKS[finding.state], finding.name, escape(finding.detail) + advice)
    table_console().print(table)


def examine(folder: Path, *, p2pd: Path | None = None) -> list[Finding]:
    """Run all checks. `folder` is where runs are kept; `p2pd` the libp2p daemon, hivemind's own unless given."""
    checks: dict[str, Check] = {
        "python": check_python,
        "torch": check_torch,
        "devices": check_devices,
        "memory": check_memory,
        "hivemind": check_hivemind,
        "p2pd": lambda: check_p2pd(p2pd),
        "ports": check_ports,
        "address": check_address,
        "disk": lambda: check_disk(folder),
        "open files": check_open_files,
        "clock": check_clock,
        "extras": check_extras,
        "compiler": check_compiler,
    }
    return [finding for name, check in checks.items() for finding in guarded(name, check)]


def guarded(name: str, check: Check) -> list[Finding]:
    """Run a check; one that cannot be made is itself a finding."""
    try:
        return list(check())
    except ImportError as error:
        return [Finding(name, "bad", f"cannot be imported: {error}", "pip install diloco")]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return [Finding(name, "bad", f"the check failed: {type(error).__name__}: {error}")]


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Check that the interpreter is 3.11 to 3.13."""
    text = "{}.{}".format(*version)
    if (3, 11) <= version <= (3, 13):
        yield Finding("python", "ok", text)
    else:
        yield Finding("python", "bad", f"{text}; diloco needs 3.11 to 3.13", "install Python 3.12 and diloco into it")


def check_torch(version: str | None = None) -> Iterator[Finding]:
    """Check that the torch version was tested: an older one is bad, a newer one a warning."""
    import torch

    version = version or str(torch.__version__)
    minor, tested = ".".join(version.split(".")[:2]), " and ".join(TESTED_TORCH)
    if minor in TESTED_TORCH:
        yield Finding("torch", "ok", version)
    elif tuple(map(int, minor.split("."))) < tuple(map(int, TESTED_TORCH[0].split("."))):
        yield Finding("torch", "bad", f"{version} is too old; tested with {tested}", "pip install -U torch")
    else:
        mend = "if training fails, use torch 2.13"
        yield Finding("torch", "warn", f"{version} is untested; tested with {tested}", mend)


def check_devices() -> Iterator[Finding]:
    """Find accelerators, or say that training will run on the CPU."""
    import torch

    if torch.cuda.is_available():
        yield from _cuda_devices()
    elif torch.backends.mps.is_available():
        from diloco.run.machine import total_memory

        yield Finding("mps", "ok", f"Apple GPU, shares {format_size(total_memory())} with the CPU")
    else:
        # macOS cannot tell the cores that this process may use from all cores
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        threads = counted(torch.get_num_threads(), "thread")
        yield Finding("cpu", "ok", f"no accelerator; {counted(cores or 1, 'core')}, torch uses {threads}")
        yield from _unused_nvidia(torch.version.cuda)


def _cuda_devices() -> Iterator[Finding]:
    """Yield a finding for each GPU, and one for NCCL."""
    import torch

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        detail = f"{device.name}, {format_size(device.total_memory)}, {'bf16' if bf16 else 'no bf16'}"
        mend = None if bf16 else "set island.dtype to fp32"
        yield Finding(f"cuda:{index}", "ok" if bf16 else "warn", detail, mend)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Finding("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        mend = "install a torch build with NCCL, or keep island.fsdp and island.tp at 1"
        yield Finding("nccl", "warn", "this torch cannot use several GPUs in one island", mend)


def _unused_nvidia(built_for_cuda: str | None) -> Iterator[Finding]:
    """Warn of a GPU that sits idle because of the wrong torch build.

    That is easily missed: training works, only slowly.
    """
    if not (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
        return
    if built_for_cuda is None:
        mend = "install a CUDA build of torch 2.13: see https://pytorch.org/get-started"
        yield Finding("cuda", "warn", "an NVIDIA driver is here, but this torch is a CPU build", mend)
    else:
        mend = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield Finding("cuda", "warn", f"torch is built for CUDA {built_for_cuda} but finds no device it can use", mend)


def check_memory() -> Iterator[Finding]:
    """Check that at least 2 GiB of memory are available; where that is unknown, report the total only."""
    from diloco.run.machine import available_memory, total_memory

    total, available = total_memory(), available_memory()
    if available is None:
        yield Finding("memory", "ok", f"{format_size(total)} in all")
        return
    detail = f"{format_size(available)} available of {format_size(total)}"
    if available < 2 * 2**30:
        yield Finding("memory", "warn", detail, "close other programs; an island takes 0.3 GiB before its model")
    else:
        yield Finding("memory", "ok", detail)


def check_hivemind() -> Iterator[Finding]:
    """Import hivemind, and check that its version is the one that diloco needs."""
    version = importlib.metadata.version("hivemind")
    importlib.import_module("hivemind")  # a clash with protobuf or torch shows only here
    if version == HIVEMIND:
        yield Finding("hivemind", "ok", version)
    else:
        yield Finding("hivemind", "bad", f"{version}; diloco needs {HIVEMIND}", f"pip install hivemind=={HIVEMIND}")


def check_p2pd(p2pd: Path | None = None, *, timeout_s: float = 15.0) -> Iterator[Finding]:
    """Check that hivemind's libp2p daemon exists, is executable, and answers with its peer id."""
    p2pd = p2pd or Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))
    reinstall = f"pip install --force-reinstall --no-deps hivemind=={HIVEMIND}"
    if not p2pd.is_file():
        yield Finding("p2pd", "bad", f"{p2pd} is missing", reinstall)
    elif not os.access(p2pd, os.X_OK):
        yield Finding("p2pd", "bad", f"{p2pd} is not executable", f"chmod +x {p2pd}")
    else:
        yield _start_p2pd(p2pd, timeout_s, reinstall)


def _start_p2pd(p2pd: Path, timeout_s: float, mend: str) -> Finding:
    """Start the daemon, and report how long it took to answer or what it printed last."""
    try:
        started_s, output = _p2pd_output(p2pd, timeout_s)
    except OSError as error:  # a binary for another processor, a file system mounted noexec
        return Finding("p2pd", "bad", f"{p2pd} does not start: {error.strerror}", mend)
    if output and output[-1].startswith("Peer ID:"):
        return Finding("p2pd", "ok", f"answers after {started_s:.1f} s")
    said = f", last line: {output[-1]}" if output else ""
    return Finding("p2pd", "bad", f"{p2pd} gave no peer id within {timeout_s:g} s{said}", mend)


def _p2pd_output(p2pd: Path, timeout_s: float) -> tuple[float, list[str]]:
    """Return the seconds until, and the lines up to, the daemon's peer id or its end.

    The daemon is gone afterwards in every case.
    """
    start, output = time.monotonic(), list[str]()
    # hivemind keeps its sockets in /tmp, whatever TMPDIR says. The idle timeout ends the daemon should we be killed.
    with tempfile.TemporaryDirectory(prefix="diloco-", dir="/tmp") as folder:
        command = [str(p2pd), f"-listen=/unix{folder}/p2pd.sock", "-hostAddrs=/ip4/127.0.0.1/tcp/0", "-idleTimeout=30s"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            alarm = threading.Timer(timeout_s, process.kill)
            alarm.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    output.append(line.strip())
                    if line.startswith("Peer ID:"):
                        break
            finally:
                alarm.cancel()
                process.kill()
    return time.monotonic() - start, output


def check_ports() -> Iterator[Finding]:
    """Open a port on loopback and one on every interface, and connect to the first."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        server.accept()[0].close()
    yield Finding("loopback", "ok", "islands on this machine can reach each other")
    with socket.create_server(("0.0.0.0", 0)):
        yield Finding("listening", "ok", "a port can be opened on every interface")


def check_address() -> Iterator[Finding]:
    """Report this machine's address towards other networks, and whether it is private."""
    address = outward_address()
    if address is None:
        mend = "connect this machine to a network to train with others"
        yield Finding("address", "warn", "no route outward: only islands on this machine can take part", mend)
    elif ipaddress.ip_address(address).is_private:
        yield Finding("address", "ok", f"{address}, private: islands elsewhere need a port that your router forwards")
    else:
        yield Finding("address", "ok", f"{address}, public")


def outward_address() -> str | None:
    """Return the address of the default route; None: there is no route.

    Connecting a UDP socket only looks up the route: nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # an address reserved for documentation
        except OSError:
            return None
        return str(probe.getsockname()[0])


def check_disk(folder: Path) -> Iterator[Finding]:
    """Check the run folder's disk. If the folder does not exist yet, its nearest existing parent counts."""
    folder = folder.absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        yield judge_disk(folder, shutil.disk_usage(place).free)
    else:
        problem = "is not writable" if place.is_dir() else "is a file"
        yield Finding("disk", "bad", f"{folder}: {place} {problem}", "give another run folder")


def judge_disk(folder: Path, free: int) -> Finding:
    """Judge the free bytes: below 1 GB is bad, below 10 GB a warning."""
    state: State = "bad" if free < 1e9 else "warn" if free < 10e9 else "ok"
    mend = None if state == "ok" else "make room or give another run folder; a snapshot takes 8 bytes a parameter"
    return Finding("disk", state, f"{format_size(free)} free in {folder}", mend)


def check_open_files() -> Iterator[Finding]:
    """Check that the limit of open files is high enough for many islands."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        yield Finding("open files", "ok", "no limit")
    elif limit >= OPEN_FILES:
        yield Finding("open files", "ok", f"{limit}")
    else:
        raisable = most == resource.RLIM_INFINITY or most >= OPEN_FILES
        mend = f"ulimit -n {OPEN_FILES}" + ("" if raisable else ", after raising the hard limit as root")
        yield Finding("open files", "warn", f"{limit} at most; many islands need {OPEN_FILES}", mend)


def check_clock(now: float | None = None) -> Iterator[Finding]:
    """Check the clock: peers correct for differences of up to a day.

    Without a network, only gross errors can be seen.
    """
    now = time.time() if now is None else now
    mend = "turn on time synchronisation (NTP)"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if time.gmtime(now).tm_year < RELEASE_YEAR:
        yield Finding("clock", "warn", f"{date} is before this diloco was made; peers will not find this machine", mend)
    elif _kernel_keeps_time() is False:
        yield Finding("clock", "warn", f"{date}; nothing keeps it in step, and peers may differ by a day at most", mend)
    else:
        yield Finding("clock", "ok", f"{date}; peers may differ by a day at most")


def _kernel_keeps_time() -> bool | None:
    """Return whether the kernel's clock is synchronised; None where it does not say (macOS, some containers)."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    answer: int = adjtimex(ctypes.create_string_buffer(512))  # all zero: only reads; struct timex is 208 bytes
    time_error = 5
    return None if answer < 0 else answer != time_error


def check_extras(extras: Mapping[str, str] = EXTRAS) -> Iterator[Finding]:
    """List the optional packages with their versions; a missing one is no fault."""
    for package, extra in extras.items():
        version = _installed(package)
        if version:
            yield Finding(package, "ok", version)
        else:
            yield Finding(package, "ok", "not installed (optional)", f"pip install 'diloco[{extra}]'")


def _installed(package: str) -> str | None:
    """Return a package's version, found without importing it; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_compiler() -> Iterator[Finding]:
    """Check that torch.compile can work.

    It builds C++ for the CPU, and on CUDA triton builds a little C for its launcher.
    """
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        yield Finding("compiler", "ok", found)
    else:
        mend = "apt install g++, or xcode-select --install on macOS"
        yield Finding("compiler", "warn", "no g++ or clang++ in PATH: torch.compile cannot be used", mend)
    yield from _triton()


def _triton() -> Iterator[Finding]:
    """Check that triton and a C compiler exist, where there is CUDA."""
    import torch

    if not torch.cuda.is_available():
        return
    version = _installed("triton") or _installed("pytorch-triton")
    if version is None:
        yield Finding("triton", "warn", "not installed: torch.compile cannot be used on CUDA", "pip install triton")
    elif not (shutil.which("gcc") or shutil.which("clang")):
        yield Finding("triton", "warn", "needs gcc or clang in PATH to compile on CUDA", "apt install gcc")
    else:
        yield Finding("triton", "ok", version)
