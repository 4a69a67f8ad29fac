"""The doctor on this very machine, and on breakage made for real: no compiler, no room, a daemon that is not one."""

import os
import resource
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import doctor
from diloco.cli.doctor import Finding

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
    assert all(finding.mend for finding in findings if finding.state == "warn")


@pytest.mark.parametrize(
    ("check", "versions"),
    [
        (doctor.check_python, {(3, 10): "bad", (3, 11): "ok", (3, 13): "ok", (3, 14): "bad"}),
        (doctor.check_torch, {"2.9.1": "bad", "2.11.0+cu130": "ok", "2.13.0+cpu": "ok"}),
        (doctor.check_torch, {"2.12.1": "warn", "2.14.0a0+git1": "warn"}),
    ],
)
def test_versions(check: Callable[[Any], Iterator[Finding]], versions: dict[Any, str]) -> None:
    assert {version: finding.state for version in versions for finding in check(version)} == versions


def test_the_versions_named_are_the_versions_required() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"hivemind=={doctor.HIVEMIND}" in required["dependencies"]
    assert f"torch>={doctor.TESTED_TORCH[0]}" in required["dependencies"]
    assert set(doctor.EXTRAS.values()) <= set(required["optional-dependencies"])


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (None, 0, "is missing"),
        (b"\x7fELF", 0o644, "is not executable"),
        (b"\x7fELF", 0o755, "does not start"),  # for another processor
        (b"#!/bin/sh\necho no entropy; exit 1\n", 0o755, "no entropy"),
    ],
)
def test_a_daemon_that_cannot_be_used(tmp_path: Path, content: bytes | None, mode: int, complaint: str) -> None:
    p2pd = tmp_path / "p2pd"
    if content is not None:
        p2pd.write_bytes(content)
        p2pd.chmod(mode)
    (finding,) = doctor.check_p2pd(p2pd)
    assert finding.state == "bad" and complaint in finding.detail
    assert finding.mend == f"chmod +x {p2pd}" if mode == 0o644 else "--force-reinstall" in str(finding.mend)


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
