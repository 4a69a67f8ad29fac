"""`diloco launch`: islands here and on other machines, started, listed, added and ended; nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from attached import TINY, free_ports
from conftest import read_events
from launched import wait_until
from ssh_hosts import MISSING, can_serve, machines, program

from diloco.config.file import load_config
from diloco.errors import ConfigError, LaunchError
from diloco.launch.backend import Island, Launch, backend_of
from diloco.launch.hosts import Ssh, read_hosts
from diloco.launch.launching import add, end, plan_join, plan_launch, start
from diloco.run.secret import IslandSecret

LONG = {"inner": {"lr": 3e-3, "warmup": 2, "steps": 100_000, "schedule": "constant"}, "sync": {"every": "1s"}}


def write_config(folder: Path, **sections: dict[str, object]) -> Path:
    path = folder / "run.yaml"
    tree = {**TINY, "run": "launched", "checkpoint": {"dir": str(folder / "run")}, **sections}
    path.write_text(yaml.safe_dump(tree))
    return path


def write_ssh_config(folder: Path, ssh: str) -> Path:
    """Write one for machines `one` and `two`."""
    (folder / "hosts").write_text("one address=127.0.0.1\ntwo address=127.0.0.1\n")
    options = {"hosts": str(folder / "hosts"), "ssh": ssh, "program": program(), "port": free_ports(3)}
    return write_config(folder, launch=options, **LONG)


def launch(*words: str) -> str:
    return diloco("launch", *words)


def diloco(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "diloco", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def processes_with(text: str) -> list[str]:
    """The command lines of all processes of this machine that have this text in them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if text in words and int(pid) != os.getpid():
            found.append(words)
    return found


def contributors(island: Path) -> list[list[str]]:
    file = island / "events.jsonl"
    return [event["contributors"] for event in read_events(file) if event["event"] == "round"] if file.exists() else []


def test_a_dry_run_prints_every_job_and_writes_nothing(tmp_path: Path) -> None:
    printed = launch(str(write_config(tmp_path)), "--islands", "2", "--dry-run")
    assert "# ---- island-0.sh" in printed and "# ---- island-1.sh" in printed and "--attach" in printed
    assert not (tmp_path / "run").exists()


def test_keys_of_the_launch_section_are_refused_by_name(tmp_path: Path) -> None:
    path = write_config(tmp_path, launch={"partion": "gpu", "time": "soon", "port": 70000})
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert "launch.partion='gpu': there is no such key; did you mean launch.partition?" in str(refused.value)
    assert "launch.time='soon'" in str(refused.value) and "launch.port=70000" in str(refused.value)


def test_the_launch_section_is_not_part_of_the_run(tmp_path: Path) -> None:
    from diloco.run.genesis import shared_of

    path = write_config(tmp_path, launch={"partition": "gpu"})
    assert "launch" not in shared_of(load_config(path))


def test_a_mesh_that_does_not_fit_the_nodes_is_refused(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, island={"batch": 16, "fsdp": 1}))
    with pytest.raises(ConfigError, match="their product is 16"):
        plan_launch(config, "local", islands=2, nodes=2, gpus=8)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--join", "runs/x", "--set", "launch.time=60"], "--set goes with CONFIG"),
        (["run.yaml", "--nodes-per-island", "2", "--dry-run"], "--nodes-per-island 2: --on local has one machine each"),
    ],
)
def test_what_would_not_be_heeded_is_refused(command, words: list[str], told: str) -> None:
    write_config(Path())
    assert told in command.refused("launch", *words)


def test_what_was_not_launched_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="was not launched"):
        Launch.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there is no host in it"),
        ("# only words\n", "there is no host in it"),
        ("one adress=10.0.0.1\n", "line 1: 'adress=10.0.0.1': write address=… or dir=… or program=…"),
        ("one\ntwo dir=\n", "line 2"),
        ("one program='python -m diloco\n", "line 1: No closing quotation"),
        ("one\n-oProxyCommand=evil\n", "line 2: '-oProxyCommand=evil' is no host"),
        ("one address=10.0.0.1:22\n", "line 1: address=10.0.0.1:22: .* without a port"),
    ],
)
def test_a_hosts_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_hosts(tmp_path / "hosts", run="mine", dir="d", program="diloco")


def test_a_hosts_file_says_where_islands_run(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "ann@one  # the first\n\ntwo address=10.0.0.2 dir=/data program='python -m diloco'\n"
    )
    one, two = read_hosts(tmp_path / "hosts", run="mine", dir="d", program="diloco")
    assert (one.destination, one.address, one.dir) == ("ann@one", "one", "d")
    assert (two.address, two.dir, two.program) == ("10.0.0.2", "/data/mine", "python -m diloco")


def test_a_host_with_a_port_and_a_folder_at_home_are_what_ssh_takes_them_for(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("ssh://ann@gpu-b:2222 dir=~/data\nfe80::1\n")
    one, two = read_hosts(tmp_path / "hosts", run="mine", dir="~/d", program="diloco")
    assert (one.destination, one.address, one.dir) == ("ssh://ann@gpu-b:2222", "gpu-b", "data/mine")
    assert (two.address, two.dir) == ("fe80::1", "d")


def test_a_machine_that_was_replaced_is_known_by_its_new_address(tmp_path: Path) -> None:
    launched = launch_by_ssh(tmp_path, "one address=10.0.0.1\ntwo address=10.0.0.2\n")
    (tmp_path / "hosts").write_text("one address=10.0.0.1\ntwo address=10.9.9.9\n")
    script = backend_of(launched).render(launched.islands)["island-1.sh"]
    assert "--at island-0=10.0.0.1:31337,island-1=10.9.9.9:31339" in script


def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("nowhere\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere' >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    options = {"hosts": str(tmp_path / "hosts"), "ssh": str(tmp_path / "ssh")}
    planned = plan_launch(load_config(write_config(tmp_path, launch=options)), "ssh", islands=1, nodes=1, gpus=0)
    with pytest.raises(LaunchError, match="nowhere: ssh: Could not resolve hostname nowhere; try: "):
        backend_of(planned).check(planned.islands)


SHOW = 'echo "${CUDA_VISIBLE_DEVICES-unset}"; exit #'
BOTH = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
FAKE_SSH = """#!/bin/sh
# stands in for ssh: destination D is a home of its own below $HOMES, whose login files print a greeting; D.dead is none
for word; do [ "$word" = "sh -s" ] || host=$word; done
[ ! -e "$HOMES/$host.dead" ] || { echo "ssh: connect to host $host port 22: Connection timed out" >&2; exit 255; }
mkdir -p "$HOMES/$host" && cd "$HOMES/$host" && echo "Welcome to $host" && HOME=$PWD exec sh -s
"""


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a home for each host, and beside it `ssh`, which reaches them."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("HOMES", str(tmp_path / "homes"))
    return tmp_path / "homes"


def launch_by_ssh(tmp_path: Path, hosts: str, islands: int = 2, **options: object) -> Launch:
    """Plan islands that stand-ins for ssh and diloco start: each prints, and works until it is asked to leave, or until
    its home has a file `over`."""
    (tmp_path / "hosts").write_text(hosts)
    until = "until [ -e over ]; do sleep 0.1; done"
    (tmp_path / "island").write_text(
        f"[ $1 != --version ] || exit 0; trap 'echo has saved; exit 75' TERM; echo works; {until}\n"
    )
    given = {"hosts": str(tmp_path / "hosts"), "ssh": str(tmp_path / "ssh"), "program": f"sh {tmp_path / 'island'}"}
    config = load_config(write_config(tmp_path, launch={**given, **options}))
    return plan_launch(config, "ssh", islands=islands, nodes=1, gpus=0)


@pytest.mark.parametrize(
    ("there", "meshes", "seen"),
    [
        ("0 1 2 3", (2, 2), ["0,1", "2,3"]),
        ("0 1 2 3", (1, 2), ["0", "1,2"]),
        ("0 1", (1, 1, 1), ["0", "1", "0"]),
        ("0 1 2", (2, 2), ["0,1", "too few GPUs on this host: island-2 needs 2, after 2 of other islands"]),
        ("", (1, 1), ["unset", "unset"]),
    ],
)
def test_islands_on_one_host_have_gpus_of_their_own(
    tmp_path: Path, homes: Path, monkeypatch: pytest.MonkeyPatch, there: str, meshes: tuple[int, ...], seen: list[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nfor gpu in {there}; do echo $gpu; done\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    planned = launch_by_ssh(tmp_path, "one\nann@two\n", islands=2 * len(meshes))  # every second one is on `one`
    sizes = {f"island-{2 * k}": mesh for k, mesh in enumerate(meshes)}
    auto = planned.config.model_copy(update={"island": planned.config.island.model_copy(update={"device": "auto"})})
    islands = [replace(island, processes=sizes.get(island.name, 1)) for island in planned.islands]
    launch = replace(planned, config=auto, islands=tuple(islands))
    shown = [
        subprocess.run(["sh"], input=script.replace(f"sh {tmp_path}/island", SHOW), **BOTH).stdout.strip()
        for name, script in backend_of(launch).render(launch.islands).items()
        if name.removesuffix(".sh") in sizes
    ]
    assert shown == seen


def test_islands_that_are_added_one_after_the_other_all_know_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ssh, "check", lambda backend, islands: None)
    monkeypatch.setattr(Ssh, "states", lambda backend: {})
    monkeypatch.setattr(Ssh, "submit", lambda backend, islands: {island.name: "job" for island in islands})
    launched, _ = start(launch_by_ssh(tmp_path, "one\ntwo\nthree\nfour\n"))
    for _ in range(2):
        launched = add(*plan_join(launched, islands=1, nodes=1, gpus=0))
    secrets = [IslandSecret.read(launched.secret_file(f"island-{number}")) for number in range(4)]
    for secret in secrets:
        assert {place.rpartition("/")[2] for place in secret.multiaddrs({})} == {
            other.peer for other in secrets if other is not secret
        }
        assert secret.start_islands == 2  # for which the first round waits, however many were added meanwhile


def test_two_launches_at_once_do_not_mix_their_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = launch_by_ssh(tmp_path, "one\ntwo\n")
    refused, submitted = [], list[str]()

    def submit(backend: Ssh, islands: Sequence[Island]) -> dict[str, str]:
        submitted.extend(island.name for island in islands)
        with pytest.raises(LaunchError, match="another `diloco launch` is at work on") as second:
            start(planned)  # somebody else, meanwhile
        refused.append(second)
        return {island.name: "job" for island in islands}

    monkeypatch.setattr(Ssh, "submit", submit)
    monkeypatch.setattr(Ssh, "check", lambda backend, islands: None)
    monkeypatch.setattr(Ssh, "states", lambda backend: {})
    launched, _ = start(planned)
    assert len(refused) == 1 and submitted == ["island-0", "island-1"]
    larger, added = plan_join(launched, islands=1, nodes=1, gpus=0)
    add(larger, added)
    with pytest.raises(LaunchError, match=r"were added to .* by somebody else meanwhile: try again"):
        add(larger, added)


def test_job_files_and_the_configuration_may_hold_keys_and_are_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ssh, "check", lambda backend, islands: None)
    monkeypatch.setattr(Ssh, "states", lambda backend: {})
    monkeypatch.setattr(Ssh, "submit", lambda backend, islands: {island.name: "job" for island in islands})
    launched, _ = start(launch_by_ssh(tmp_path, "one\n", 1, environment={"WANDB_API_KEY": "s3cr3t"}))
    holding = [path for path in launched.folder.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]
    assert {str(path.relative_to(launched.folder)) for path in holding} == {"launch/config.yaml", "launch/island-0.sh"}
    assert launched.here.stat().st_mode & 0o077 == 0
    assert "s3cr3t" not in backend_of(launched)._start(launched.islands[0]).partition("/config.yaml <<")[2]


@pytest.fixture
def at_work(tmp_path: Path, homes: Path) -> Iterator[Launch]:
    """Two islands at work on two hosts."""
    planned = launch_by_ssh(tmp_path, "one\ntwo\n")
    backend = backend_of(planned)
    planned.here.mkdir(parents=True)
    planned.config_file.write_text(planned.config_text)
    for island in planned.islands:
        planned.secret_file(island.name).parent.mkdir(exist_ok=True)
        planned.secret_file(island.name).write_text("{}")
    backend.submit(planned.islands)
    logs = [homes / host / "diloco/launched" / f"island-{k}.job/output.log" for k, host in enumerate(("one", "two"))]
    assert wait_until(lambda: all("works" in log.read_text() for log in logs if log.exists()))
    yield planned
    for dead in homes.glob("*.dead"):
        dead.unlink()
    backend.cancel(planned.islands)
    assert processes_with(str(tmp_path / "island")) == []


def test_a_host_that_greets_does_not_hide_how_its_island_is(at_work: Launch) -> None:
    assert [job.state for job in backend_of(at_work).states().values()] == ["running", "running"]


def test_a_dead_host_hides_no_other_island_and_does_not_keep_it_from_being_stopped(
    homes: Path, at_work: Launch
) -> None:
    (homes / "one.dead").touch()
    states = backend_of(at_work).states()
    assert states["island-1"].state == "running" and "Connection timed out" in states["island-0"].detail
    with pytest.raises(LaunchError, match="one: ssh: connect to host one port 22: Connection timed out"):
        end(at_work, at_work.islands)
    (homes / "one.dead").unlink()
    assert list(backend_of(at_work).states()) == ["island-0"]  # nothing is left of the other one


@pytest.mark.parametrize("hosts", ["two\none\n", "three\none\ntwo dir=elsewhere\n", "three\n"])
def test_islands_are_found_where_they_were_started_whatever_the_hosts_file_says_by_now(
    tmp_path: Path, at_work: Launch, hosts: str
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    states = backend_of(at_work).states()
    assert [(job.state, job.where) for job in states.values()] == [("running", "one"), ("running", "two")]
    end(at_work, at_work.islands)
    assert processes_with(str(tmp_path / "island")) == []


def test_an_island_whose_host_is_no_longer_listed_gets_another_and_new_ones_get_the_emptiest(tmp_path: Path) -> None:
    planned = launch_by_ssh(tmp_path, "one\ntwo\n", islands=3)
    assert [island.host for island in planned.islands] == ["one", "two", "one"]
    (tmp_path / "hosts").write_text("three address=10.0.0.3\none\n")
    assert [island.host for island in backend_of(planned).place(planned.islands)] == ["one", "three", "one"]
    larger, added = plan_join(planned, islands=2, nodes=1, gpus=0)
    assert [(island.host, island.address) for island in added] == [
        ("three", "10.0.0.3:31343"), ("three", "10.0.0.3:31345")
    ]  # fmt: skip
    assert larger.islands[:3] == planned.islands


def test_an_island_that_was_away_at_the_end_of_the_run_hears_of_it_on_its_host(at_work: Launch, homes: Path) -> None:
    (homes / "one" / "over").touch()
    assert wait_until(lambda: backend_of(at_work).states()["island-0"].state == "finished")
    assert (homes / "two/diloco/launched/finished").exists()  # by which its script ends it
    larger, added = plan_join(at_work, islands=1, nodes=1, gpus=0)
    at_work.write()
    with pytest.raises(LaunchError, match="is finished: nobody is left to join"):
        add(larger, added)
    assert start(at_work)[1] == ()


def test_what_an_island_says_while_it_leaves_is_kept(at_work: Launch) -> None:
    end(at_work, at_work.islands)
    assert (at_work.here / "logs" / "island-1.log").read_text() == "works\nhas saved\n"


def test_an_island_whose_watching_script_was_killed_is_still_seen_and_stopped(at_work: Launch, homes: Path) -> None:
    script = int((homes / "two/diloco/launched/island-1.job/pid").read_text())
    os.kill(script, signal.SIGKILL)
    assert wait_until(lambda: not Path(f"/proc/{script}/cmdline").exists() or not is_at_work(script))
    assert [job.state for job in backend_of(at_work).states().values()] == ["running", "running"]
    end(at_work, at_work.islands)
    assert processes_with(str(homes.parent / "island")) == []


@pytest.fixture
def another_run() -> Iterator[int]:
    """The port of an island of another run on this machine: a process that is called as one, and listens."""
    port = free_ports(1)
    listen = f"import socket, time; here = socket.create_server(('127.0.0.1', {port})); print(); time.sleep(600)"
    words = ["run", "c.yaml", "--attach", "secret", "--dir", "/others/island-0", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-uc", listen, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield port
        process.kill()


@pytest.mark.parametrize("on", ["local", "ssh"])
def test_a_port_that_another_run_has_is_refused_by_that_runs_name(
    tmp_path: Path, homes: Path, another_run: int, on: str
) -> None:
    planned = launch_by_ssh(tmp_path, "one\n", 1, port=another_run)
    where = "this machine" if on == "local" else "one"
    with pytest.raises(LaunchError, match=f"{where}: port {another_run} is taken by /others/island-0: .*launch.port"):
        start(plan_launch(planned.config, on, islands=1, nodes=1, gpus=0))
    assert not planned.folder.exists()


def test_islands_here_get_ports_that_are_free_unless_some_are_configured(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    with ExitStack() as stack:
        for port in (31337, 31342):  # unless another program has them anyway
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        planned = plan_launch(config, "local", islands=3, nodes=1, gpus=0)
        larger, _ = plan_join(planned, islands=1, nodes=1, gpus=0)
        ports = [island.port for island in larger.islands]
        assert len(set(ports)) == 4 and not {31337, 31341} & set(ports)
        assert [island.address for island in larger.islands] == [f"127.0.0.1:{port}" for port in ports]
        backend_of(larger).check(larger.islands)


def is_at_work(pid: int) -> bool:
    """Tell whether a process is more than a zombie that nobody has waited for."""
    return Path(f"/proc/{pid}/cmdline").read_bytes() != b""


@pytest.mark.slow
def test_islands_here_are_started_again_and_finish(tmp_path: Path) -> None:
    path = write_config(tmp_path, launch={"port": free_ports(2)}, elastic={"min_islands": 2})
    run = tmp_path / "run"
    launch(str(path), "--islands", "2")
    assert "started on local: nothing" in launch(str(path), "--islands", "2")
    assert wait_until(lambda: len(list(run.glob("launch/jobs/*/exit"))) == 2, 600)
    assert launch("--list", str(run)).count("finished") == 2
    assert "started on local: nothing" in launch(str(path), "--islands", "2")
    assert "done: step 20" in (run / "launch" / "logs" / "island-1.log").read_text()
    assert [oct(file.stat().st_mode)[-3:] for file in sorted((run / "launch").glob("secrets/island-?"))] == ["600"] * 2
    launch("--stop", str(run))
    assert processes_with(str(tmp_path)) == [] and list((run / "launch" / "jobs").iterdir()) == []


@pytest.mark.slow
def test_what_was_launched_is_stopped_as_a_run_and_as_an_island_and_is_not_started_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, launch={"port": free_ports(2)}, **LONG)
    run = tmp_path / "run"
    launch(str(path), "--islands", "2")
    try:
        assert wait_until(lambda: len(contributors(run / "island-1")) > 1 and len(contributors(run / "island-0")) > 1)
        assert "continues it" in diloco("stop", str(run / "island-1"))
        assert processes_with(str(run / "island-1")) == [] and processes_with(str(run / "island-0"))
        assert "continues it" in diloco("stop", str(run))
        assert processes_with(str(tmp_path)) == []
        assert diloco("stop", str(run)) == f"{run} is not running\n"
    finally:
        launch("--stop", str(run))


@pytest.mark.cluster
@pytest.mark.skipif(not can_serve(), reason=MISSING)
def test_islands_on_two_machines_by_ssh_leave_nothing_behind(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two"]) as ssh:
        path = write_ssh_config(tmp_path, ssh)
        run, one, two = str(tmp_path / "run"), tmp_path / "one/diloco/launched", tmp_path / "two/diloco/launched"
        launch(str(path), "--on", "ssh", "--islands", "2")
        assert oct((two / "island-1.job" / "secret").stat().st_mode)[-3:] == "600"
        assert not (one / "island-1.job").exists()
        assert wait_until(lambda: contributors(two / "island-1")[-1:] == [["island-0", "island-1"]])
        listed = launch("--list", run).splitlines()
        assert [line.split()[:3] for line in listed] == [[f"island-{k}", "running", "round"] for k in range(2)], listed
        launch("--stop", run)
        servers = processes_with("sshd_config")
        assert [words for words in processes_with(str(tmp_path)) if words not in servers] == []
        assert [str(file) for file in tmp_path.glob("*/diloco/**/*secret*")] == []
        assert [file.name for host in (one, two) for file in host.iterdir()] == ["island-0", "island-1"]
        assert "step" in (tmp_path / "run" / "launch" / "logs" / "island-0.log").read_text()


@pytest.mark.soak
@pytest.mark.skipif(not can_serve(), reason=MISSING)
def test_islands_by_ssh_are_added_cancelled_stopped_and_launched_again(tmp_path: Path) -> None:
    with machines(tmp_path, ["one", "two"]) as ssh:
        path = write_ssh_config(tmp_path, ssh)
        run, one, two = str(tmp_path / "run"), tmp_path / "one/diloco/launched", tmp_path / "two/diloco/launched"

        launch(str(path), "--on", "ssh", "--islands", "2")
        assert wait_until(lambda: contributors(two / "island-1")[-1:] == [["island-0", "island-1"]])
        launch("--join", run, "--islands", "1")
        assert wait_until(lambda: "island-2" in (contributors(one / "island-2") or [[]])[-1])
        listed = launch("--list", run).splitlines()
        assert [line.split()[:3] for line in listed] == [[f"island-{k}", "running", "round"] for k in range(3)], listed

        launch("--cancel", run, "island-1")
        assert processes_with(str(two)) == [] and [file.name for file in two.iterdir()] == ["island-1"]
        launch("--stop", run)
        assert processes_with(str(tmp_path / "one")) == [
            sshd for sshd in processes_with("sshd_config") if "/one/" in sshd
        ]
        assert [str(file) for file in tmp_path.glob("*/diloco/**/*secret*")] == []
        assert [file.name for file in sorted(one.iterdir())] == ["island-0", "island-2"]
        assert "step" in (tmp_path / "run" / "launch" / "logs" / "island-0.log").read_text()

        step = max(event.get("step") or 0 for event in read_events(one / "island-0" / "events.jsonl"))
        diloco("set", str(one / "island-0"), f"inner.steps={step + 300}")
        launch(str(path), "--on", "ssh", "--islands", "2")  # continues, without the one that was cancelled
        assert not (two / "island-1.job").exists()
        assert wait_until(lambda: len(list(one.glob("*.job/exit"))) == 2, 600)
        assert launch("--list", run).count("finished") == 2 and not list(one.glob("*.job/secret"))
        told = [read_events(one / name / "events.jsonl") for name in ("island-0", "island-2")]
        ends = [[event for event in events if event["event"] == "agreed"][-1] for events in told]
        assert ends[0]["round"] == ends[1]["round"] and ends[0]["state"] == ends[1]["state"]
        launch("--stop", run)
        assert [file.name for file in sorted(one.iterdir())] == ["island-0", "island-2"]
