"""The doctor on this very machine, and on breakage made for real: no compiler, no room, a daemon that is not one."""

import os
import resource
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli import examine as doctor
from diloco.cli.examine import Finding

ROOT = Path(__file__).parent.parent


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_machine_that_can_run_the_tests_has_nothing_bad(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    names = [finding.name for finding in findings]
    assert [finding for finding in findings if finding.state == "bad"] == []
    assert {"python", "torch", "memory", "hivemind", "p2pd", "loopback", "disk", "clock", "wandb"} <= set(names)
    assert len(names) == len(set(names))


def test_every_warning_says_how_to_mend_it(tmp_path: Path) -> None:
    assert all(finding.mend for finding in doctor.examine(tmp_path) if finding.state == "warn")


@pytest.mark.parametrize(("version", "state"), [((3, 10), "bad"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "bad")])
def test_python_version(version: tuple[int, int], state: str) -> None:
    assert [finding.state for finding in doctor.check_python(version)] == [state]


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.9.1", "bad"), ("2.11.0+cu130", "ok"), ("2.12.1", "warn"), ("2.13.0+cpu", "ok"), ("2.14.0a0+git1", "warn")],
)
def test_torch_version(version: str, state: str) -> None:
    assert doctor.judge_torch(version).state == state


def test_the_versions_named_are_the_versions_required() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"hivemind=={doctor.HIVEMIND}" in required["dependencies"]
    assert f"torch>={doctor.TESTED_TORCH[0]}" in required["dependencies"]
    assert set(doctor.EXTRAS.values()) <= set(required["optional-dependencies"])


def test_the_daemon_answers() -> None:
    (finding,) = doctor.check_p2pd()
    assert finding.state == "ok", finding.detail


def test_a_missing_daemon(tmp_path: Path) -> None:
    (finding,) = doctor.check_p2pd(tmp_path / "p2pd")
    assert (finding.state, "missing" in finding.detail) == ("bad", True)


def test_a_daemon_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "p2pd").write_bytes(b"\x7fELF")
    (finding,) = doctor.check_p2pd(tmp_path / "p2pd")
    assert (finding.state, finding.mend) == ("bad", f"chmod +x {tmp_path / 'p2pd'}")


def test_a_daemon_for_another_processor(tmp_path: Path) -> None:
    (tmp_path / "p2pd").write_bytes(b"\x7fELF")
    (tmp_path / "p2pd").chmod(0o755)
    (finding,) = doctor.check_p2pd(tmp_path / "p2pd")
    assert (finding.state, "does not start" in finding.detail) == ("bad", True)


def test_a_daemon_that_gives_up_is_quoted(tmp_path: Path) -> None:
    (finding,) = doctor.check_p2pd(script(tmp_path / "p2pd", "echo no entropy; exit 1"))
    assert (finding.state, "no entropy" in finding.detail) == ("bad", True)


def test_a_silent_daemon_is_killed_in_time(tmp_path: Path) -> None:
    p2pd = script(tmp_path / "p2pd", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    (finding,) = doctor.check_p2pd(p2pd, timeout_s=0.5)
    assert (finding.state, "within 0.5 s" in finding.detail) == ("bad", True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_broken_daemon_leaves_the_other_checks_standing(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path, p2pd=tmp_path / "p2pd")
    assert [finding.name for finding in findings if finding.state == "bad"] == ["p2pd"]


def test_no_compiler_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(doctor.check_compiler()).state == "warn"
    script(tmp_path / "clang++", "exit 0")
    assert next(doctor.check_compiler()).detail == str(tmp_path / "clang++")


def test_a_driver_beside_a_cpu_build_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    script(tmp_path / "nvidia-smi", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [f.name for f in doctor.check_devices() if "CPU build" in f.detail and f.state == "warn"] == ["cuda"]


def test_a_run_folder_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    (there,), (not_yet,) = doctor.check_disk(tmp_path), doctor.check_disk(tmp_path / "not" / "yet")
    assert not_yet.state == there.state
    assert str(tmp_path / "not" / "yet") in not_yet.detail


def test_a_run_folder_inside_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = doctor.check_disk(tmp_path / "file" / "run")
    assert (finding.state, f"{tmp_path / 'file'} is a file" in finding.detail) == ("bad", True)


@pytest.mark.parametrize(("free", "state"), [(999_999_999, "bad"), (9_999_999_999, "warn"), (10**10, "ok")])
def test_free_disk(free: int, state: str) -> None:
    assert doctor.judge_disk(Path("runs"), free).state == state


def test_a_low_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        (finding,) = doctor.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (finding.state, "ulimit -n 4096" in str(finding.mend)) == ("warn", True)


def test_a_clock_that_lost_its_battery() -> None:
    (finding,) = doctor.check_clock(now=0.0)
    assert (finding.state, "1970-01-01" in finding.detail) == ("warn", True)


def test_an_extra_that_is_not_installed() -> None:
    (finding,) = doctor.check_extras({"no-such-package": "hf"})
    assert (finding.state, finding.mend) == ("ok", "pip install 'diloco[hf]'")


@pytest.mark.parametrize("error", [OSError("no /proc"), ImportError("no torch"), RuntimeError("no CUDA")])
def test_a_check_that_raises_becomes_a_finding(error: Exception) -> None:
    def check() -> Iterator[Finding]:
        raise error

    (finding,) = doctor.guarded("devices", check)
    assert (finding.name, finding.state, str(error) in finding.detail) == ("devices", "bad", True)


def test_a_mistake_of_our_own_is_not_hidden() -> None:
    def check() -> Iterator[Finding]:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        doctor.guarded("devices", check)
