"""Islands on Kubernetes: manifests that a validator of the real schemas accepts, and what kubectl is asked for."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from launched import wait_until

from diloco.config.file import load_config
from diloco.errors import ConfigError, LaunchError
from diloco.launch import launching
from diloco.launch.backend import TEMPLATES, Launch
from diloco.launch.kubernetes import Kubernetes
from diloco.launch.launching import plan_launch

IMAGE = "registry.example/diloco:1"
SETTINGS = {
    "a laptop's cluster": ({}, {"nodes": 1, "gpus": 0}),
    "eight GPUs and a volume": (
        {"storage": "200Gi", "resources": {"cpu": 16, "memory": "64Gi"}}, {"nodes": 1, "gpus": 8}
    ),
    "two machines, variables and a namespace": (
        {
            "storage": "1Ti", "namespace": "team-a", "environment": {"NCCL_DEBUG": "WARN", "QUOTES": "a \"b\" 'c': d"},
            "setup": ["ulimit -l unlimited"], "grace_s": 300, "restarts": 20, "program": "/opt/venv/bin/diloco",
        },
        {"nodes": 2, "gpus": 4},
    ),
}  # fmt: skip


def launch_of(tmp_path: Path, options: dict[str, object], run: str = "big", **asked: int) -> Launch:
    path = tmp_path / "run.yaml"
    tree = {**SMALL, "run": run, "launch": {"image": IMAGE, **options}, "checkpoint": {"dir": str(tmp_path / "run")}}
    path.write_text(yaml.safe_dump(tree))
    return plan_launch(load_config(path), "kubernetes", islands=2, **asked)


def validate(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What kubernetes-validate says of a manifest, unknown fields included."""
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    program = Path(sys.executable).parent / "kubernetes-validate"
    return subprocess.run([program, "--strict", path], capture_output=True, text=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_manifests_are_valid(tmp_path, setting):
    options, asked = SETTINGS[setting]
    launch = launch_of(tmp_path, options, **asked)
    files = Kubernetes(launch).render(launch.islands)
    assert list(files) == ["island-0.yaml", "island-1.yaml"]
    for text in files.values():
        found = validate(tmp_path, text)
        assert found.returncode == 0, found.stdout + found.stderr
        kinds = [item["kind"] for item in yaml.safe_load_all(text)]
        volume = ["PersistentVolumeClaim"] if "storage" in options else []
        assert kinds == ["ConfigMap", "Service", *volume, "Job"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("completions:", "completion:"),
        ("podFailurePolicy:", "podFailurePolicies:"),
        ("backoffLimit: 5", "backoffLimit: many"),
        ("containerPort: 31337", "containerPort: http"),
        ("accessModes: [ReadWriteOnce]", "accessModes: ReadWriteOnce"),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path, right, wrong):
    launch = launch_of(tmp_path, {"storage": "1Gi"}, nodes=1, gpus=0)
    text = Kubernetes(launch).render(launch.islands[:1])["island-0.yaml"]
    assert text.count(right) == 1
    assert validate(tmp_path, text.replace(right, wrong)).returncode != 0


def job_of(launch: Launch, number: int) -> dict:
    text = Kubernetes(launch).render([launch.islands[number]])[f"island-{number}.yaml"]
    return list(yaml.safe_load_all(text))[-1]


def test_an_island_of_two_machines_is_an_indexed_job_of_two_pods_that_meet_at_the_first(tmp_path):
    launch = launch_of(tmp_path, {"storage": "1Ti", "namespace": "team-a"}, nodes=2, gpus=4)
    job = job_of(launch, 1)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    host = "big-island-1-0.big-island-1.team-a.svc"
    assert f"machine.sh 2 {host} 31336 4 torchrun -- " in container["args"][0]
    assert f"--set island.fsdp=8 --host {host}" in container["args"][0]
    assert launch.islands[1].address == f"{host}:31339"
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule == {"action": "Ignore", "onExitCodes": {"containerName": "island", "operator": "In", "values": [75]}}


def test_machines_of_an_island_without_a_volume_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--nodes-per-island 2: .* set launch\.storage"):
        launch_of(tmp_path, {}, nodes=2, gpus=0)


def test_devices_are_limits_and_the_rest_is_requested(tmp_path):
    launch = launch_of(tmp_path, {"resources": {"cpu": 8, "rdma/hca": 1}}, nodes=1, gpus=4)
    container = job_of(launch, 0)["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"requests": {"cpu": "8"}, "limits": {"rdma/hca": "1", "nvidia.com/gpu": "4"}}


def test_no_secret_is_in_a_manifest(tmp_path, kubectl):
    launch, _ = launching.start(launch_of(tmp_path, {}, nodes=1, gpus=0))
    secret = json.loads(launch.secret_file("island-0").read_text())
    text = (launch.here / "island-0.yaml").read_text()
    assert secret["identity"] not in text and secret["owner"] not in text and secret["ticket"] not in text


def test_what_kubernetes_cannot_take_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"launch\.image=null"):
        launch = launch_of(tmp_path, {"image": None}, nodes=1, gpus=0)
        Kubernetes(launch).render(launch.islands)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "run": "My_Run", "launch": {"image": IMAGE}}))
    with pytest.raises(ConfigError, match="run=My_Run: Kubernetes takes small letters"):
        plan_launch(load_config(path), "kubernetes", islands=1, nodes=1, gpus=0)


def test_a_template_of_ones_own_is_used_and_an_unknown_name_in_it_refused(tmp_path):
    own = tmp_path / "templates"
    own.mkdir()
    (own / "kubernetes.yaml").write_text("kind: Mine\nname: {{name}}\n{{command}}\n")
    launch = launch_of(tmp_path, {"templates": str(own)}, nodes=1, gpus=0)
    text = Kubernetes(launch).render(launch.islands)["island-0.yaml"]
    assert text.startswith("kind: Mine\nname: big-island-0\ntrap 'exit 75' TERM\n") and "\ninstall -D" in text
    (own / "kubernetes.yaml").write_text("{{nodse}}")
    with pytest.raises(ConfigError, match=r"\{\{nodse\}\} stands for nothing: use .*nodes"):
        Kubernetes(launch).render(launch.islands)


@pytest.mark.parametrize("run", ["on", "2026", "1e3", "null"])
def test_a_run_that_yaml_takes_for_something_else_keeps_its_name(tmp_path, run):
    options = {"storage": "1", "namespace": "7", "dir": "/my data/$x"}
    launch = launch_of(tmp_path, options, run=run, nodes=1, gpus=0)
    text = Kubernetes(launch).render(launch.islands)["island-0.yaml"]
    found = validate(tmp_path, text)
    assert found.returncode == 0, found.stdout + found.stderr
    *others, job = yaml.safe_load_all(text)
    assert {item["metadata"]["labels"]["diloco-run"] for item in (*others, job)} == {run}
    assert {item["metadata"]["namespace"] for item in (*others, job)} == {"7"}
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["volumeMounts"][0]["mountPath"] == "/my data/$x"
    assert "install -D -m 600 /secret/secret '/my data/$x/secret/island-0'" in container["args"][0]


def test_a_failure_of_an_island_counts_once_however_many_machines_it_has(tmp_path):
    launch = launch_of(tmp_path, {"restarts": 5, "storage": "1Ti"}, nodes=8, gpus=1)
    *_, job = yaml.safe_load_all(Kubernetes(launch).render(launch.islands)["island-0.yaml"])
    assert job["spec"]["backoffLimit"] == 5 * 8


def test_a_folder_that_pods_do_not_have_is_refused(tmp_path):
    launch = launch_of(tmp_path, {"dir": "~/runs"}, nodes=1, gpus=0)
    with pytest.raises(ConfigError, match=r"launch\.dir=~/runs: .* begins with /"):
        Kubernetes(launch).render(launch.islands)


def pod(tmp_path: Path, getent: str, torchrun: str) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a pod of an island of two machines, with stand-ins for the network's names and
    for torchrun."""
    commands = tmp_path / "commands"
    commands.mkdir(exist_ok=True)
    for name, body in {"getent": getent, "torchrun": torchrun}.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "secret").write_text("{}")
    launch = launch_of(
        tmp_path, {"dir": str(tmp_path / "data"), "program": f"{commands}/diloco", "storage": "1Gi"}, nodes=2, gpus=1
    )
    text = job_of(launch, 0)["spec"]["template"]["spec"]["containers"][0]["args"][0]
    text = text.replace("/secret/secret", f"{tmp_path}/secret", 1).replace(
        "/launch/machine.sh", str(TEMPLATES / "machine.sh")
    )
    return ["bash", "-c", text], {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_pod_that_waits_for_its_name_ends_at_once_when_it_is_asked_to(tmp_path):
    words, variables = pod(tmp_path, f"touch {tmp_path}/asked; exit 2", "exit 0")
    first = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", *words], env=variables)
    try:
        assert wait_until(lambda: (tmp_path / "asked").exists(), 60)
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)  # which is process 1 where it lives, as in a pod
        assert first.wait(60) == 75
    finally:
        first.kill()
        first.wait()


def test_a_pod_that_fails_after_another_of_its_island_has_seen_the_end_does_not_wait_for_that_one(tmp_path):
    words, variables = pod(tmp_path, "exit 0", '[ "$JOB_COMPLETION_INDEX" = 1 ]')
    codes = [
        subprocess.run(words, env={**variables, "JOB_COMPLETION_INDEX": index}, timeout=60).returncode
        for index in "0110"
    ]
    assert codes == [1, 0, 0, 0]  # the first one failed before anybody had seen the end


KUBECTL = """#!/bin/sh
# stands in for the program, which no test cluster answers to: notes what it is asked for
echo "$@" >>"$KUBECTL_CALLS"
case "$*" in
    *"-f -"*) cat >>"$KUBECTL_STDIN" ;;
    *"get jobs,pods"*) cat "$KUBECTL_ANSWER" ;;
    *logs*) echo "what it has printed" ;;
    *broken*) echo "Error from server: no" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("calls", "stdin", "answer"):
        monkeypatch.setenv(f"KUBECTL_{name.upper()}", str(tmp_path / name))
    (tmp_path / "answer").write_text('{"items": []}')
    return tmp_path


def test_secrets_go_to_kubectl_by_its_standard_input_and_a_job_is_made_anew(tmp_path, kubectl):
    launch, started = launching.start(launch_of(tmp_path, {}, nodes=1, gpus=0))
    assert [island.name for island in started] == ["island-0", "island-1"]
    secret = json.loads((kubectl / "stdin").read_text().split("}{")[0].rstrip("}") + "}}")
    assert secret["kind"] == "Secret" and secret["metadata"]["name"] == "big-island-0"
    assert secret["stringData"]["secret"] == launch.secret_file("island-0").read_text()
    calls = (kubectl / "calls").read_text()
    assert "delete job big-island-1 --ignore-not-found" in calls and f"apply -f {launch.here}/island-1.yaml" in calls
    logs = launching.cancel(launch, ["island-1"])
    assert "delete service,configmap,secret big-island-1" in (kubectl / "calls").read_text()
    assert logs["island-1"].read_text() == "what it has printed\n"
    calls = (kubectl / "calls").read_text()
    assert calls.index("logs -l diloco-run=big,diloco-island=island-1") < calls.index(
        "delete job big-island-1 --cascade"
    )


def test_islands_that_are_stopped_leave_together(tmp_path, kubectl):
    launch, _ = launching.start(launch_of(tmp_path, {}, nodes=1, gpus=0))
    launching.end(launch, launch.islands)
    calls = (kubectl / "calls").read_text()
    assert "delete job big-island-0 big-island-1 --cascade=foreground --ignore-not-found --timeout=" in calls


def item(kind: str, island: str, **status: object) -> dict:
    return {
        "kind": kind, "metadata": {"labels": {"diloco-island": island}}, "spec": {"nodeName": "n7"}, "status": status
    }  # fmt: skip


def test_states_come_from_jobs_and_their_pods(tmp_path, kubectl):
    launch, _ = launching.start(launch_of(tmp_path, {}, nodes=1, gpus=0))

    def state(*items: dict) -> str:
        (tmp_path / "answer").write_text(json.dumps({"items": items}))
        found = Kubernetes(launch).states()["island-0"]
        return f"{found.state} {found.where} {found.detail}".strip()

    job = item("Job", "island-0", active=1)
    assert state(job, item("Pod", "island-0", phase="Pending")) == "waiting  0 of 1 pods run"
    assert state(job, item("Pod", "island-0", phase="Running")) == "running n7"
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert state(item("Job", "island-0", **done)) == "finished"
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    assert state(item("Job", "island-0", **failed)) == "failed  BackoffLimitExceeded"
    assert state(item("Job", "island-1")) == "gone  it has no Job"


def test_without_kubectl_or_when_it_fails_people_are_told(tmp_path, kubectl, monkeypatch):
    launch = launch_of(tmp_path, {"namespace": "broken"}, nodes=1, gpus=0)
    with pytest.raises(LaunchError, match="kubectl delete: Error from server: no"):
        launching.start(launch)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no kubectl here"):
        Kubernetes(launch).check(launch.islands)
