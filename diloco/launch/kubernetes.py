"""Islands on Kubernetes: each an Indexed Job of its own, so that one restarts without touching the others.

The template `kubernetes.yaml` is one island. Its pods have names that stay the same however often they are made anew,
so every address is known beforehand. kubectl does the rest; the secrets go to it on its standard input.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, LaunchError
from diloco.launch.backend import (
    CALL_S,
    LOGS,
    Island,
    JobState,
    Launch,
    attach_words,
    call,
    fill,
    program_of,
    torchrun_of,
)

FOLDER = "/run-data"  # in a pod: where the island's volume is
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAME_LIMIT = 60  # of 63: a pod's name adds its number
RUN, ISLAND = "diloco-run", "diloco-island"  # labels


class Kubernetes:
    """Apply a manifest for each island by kubectl, and follow its Job and its pods."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.options = launch, launch.config.launch

    def check(self, islands: Sequence[Island]) -> None:
        """Refuse a machine without kubectl, and what cannot be rendered."""
        if shutil.which("kubectl") is None:
            raise LaunchError("there is no kubectl here: install it, or apply the files of --dry-run elsewhere")
        self.render(islands)

    def place(self, islands: Sequence[Island]) -> list[Island]:
        """Return the islands with where their first pods listen, by the names that their Services give them.

        Raise ConfigError for islands of several machines that share no folder.
        """
        if self.options.storage is None and (several := [island for island in islands if island.nodes > 1]):
            raise ConfigError(
                f"--nodes-per-island {several[0].nodes}: machines of an island share its folder: set launch.storage to "
                "the size of a volume"
            )
        return [replace(island, address=f"{self._host(island)}:{island.port}") for island in islands]

    def render(self, islands: Sequence[Island]) -> dict[str, str]:
        """Return a manifest for each island."""
        return {f"{island.name}.yaml": self._manifest(island) for island in islands}

    def name(self, island: Island) -> str:
        """Return what the objects of an island are called; raise ConfigError where that is no name for Kubernetes."""
        name = f"{self.launch.config.run}-{island.name}"
        if not LABEL.fullmatch(name) or len(name) > NAME_LIMIT:
            raise ConfigError(
                f"run={self.launch.config.run}: Kubernetes takes small letters, digits and -, and with the island's "
                f"name at most {NAME_LIMIT} of them: set run=NAME to such a name"
            )
        return name

    def _host(self, island: Island) -> str:
        name = self.name(island)
        return f"{name}-0.{name}.{self.options.namespace}.svc"

    def _manifest(self, island: Island) -> str:
        if self.options.image is None:
            raise ConfigError("launch.image=null: --on kubernetes needs the name of an image with diloco in it")
        options = self.options
        values = {
            **self._names(island),
            "config": self.launch.island_config_text, "machine": fill("machine.sh", {}, options.templates),
            "port": island.port, "second_port": island.port + 1, "nodes": island.nodes,
            "restarts": options.restarts * island.nodes,  # a failure of one machine ends the pods of all
            "grace_s": max(1, int(options.grace_s)), "image": json.dumps(options.image),
            "folder": json.dumps(self._folder), "command": self._command(island),
            "environment": _variables(options.environment),
            "resources": _resources(options.resources, island.gpus), "volume": self._volume(island),
            "run_volume": _run_volume(self.name(island), kept=options.storage is not None),
        }  # fmt: skip
        return fill("kubernetes.yaml", values, options.templates)

    def _names(self, island: Island) -> dict[str, str]:
        """Return an island's names, as YAML takes them for text: a run may be called `on`, or 2026."""
        own = {"namespace": json.dumps(self.options.namespace), "run": json.dumps(self.launch.config.run)}
        return {"name": self.name(island), "island": island.name, **own}

    @property
    def _folder(self) -> str:
        folder = self.options.dir or FOLDER
        if not folder.startswith("/"):
            raise ConfigError(f"launch.dir={folder}: it is a folder of the pods: write a path that begins with /")
        return folder

    def _command(self, island: Island) -> str:
        """Return the shell lines of a pod: a private copy of the secret, then the island's part on this machine."""
        host, secret = self._host(island), f"{self._folder}/secret/{island.name}"
        program = program_of(self.launch, same_machine=False)
        folder = f"{self._folder}/{island.name}"
        words = attach_words(self.launch, island, config="/launch/config.yaml", secret=secret, folder=folder)
        machine = [str(island.nodes), host, str(self.options.port - 1), str(island.processes)]
        finished = shlex.quote(f"{self._folder}/{island.name}.finished")
        return "\n".join([
            "trap 'exit 75' TERM",  # the first process of a pod hears no signal that it does not handle
            # a pod that has seen the end is not made anew when another one of its island fails after that
            f"export DILOCO_FINISHED={finished}; [ ! -e {finished} ] || exit 0",
            *self.options.setup,
            f"install -D -m 600 /secret/secret {shlex.quote(secret)}",
            f"until getent hosts {host} >/dev/null; do sleep 1; done",
            f"exec bash /launch/machine.sh {shlex.join(machine)} {torchrun_of(program)} -- \\",
            f"  {program} {shlex.join(words)} --host {host}",
        ])  # fmt: skip

    def _volume(self, island: Island) -> str:
        if self.options.storage is None:
            return ""
        values = {
            **self._names(island), "size": json.dumps(self.options.storage),
            "access": "ReadWriteOnce" if island.nodes == 1 else "ReadWriteMany",
        }  # fmt: skip
        return fill("kubernetes-volume.yaml", values, self.options.templates)

    def submit(self, islands: Sequence[Island]) -> dict[str, str]:
        """Apply secrets and manifests; a Job that has ended is made anew."""
        for island in islands:
            self._call("apply", "--server-side", "--force-conflicts", "-f", "-", text=self._secret(island))
            self._call("delete", "job", self.name(island), "--ignore-not-found")
            self._call("apply", "-f", str(self.launch.here / f"{island.name}.yaml"))
        return {island.name: f"job/{self.name(island)}" for island in islands}

    def _secret(self, island: Island) -> str:
        labels = {"app": "diloco", RUN: self.launch.config.run, ISLAND: island.name}
        metadata = {"name": self.name(island), "namespace": self.options.namespace, "labels": labels}
        text = self.launch.secret_file(island.name).read_text(encoding="utf-8")
        return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"secret": text}})

    def states(self) -> dict[str, JobState]:
        """Ask Kubernetes how the islands' Jobs and pods are."""
        submitted = [island for island in self.launch.islands if island.job]
        if not submitted:
            return {}
        listed = self._call("get", "jobs,pods", "-l", f"{RUN}={self.launch.config.run}", "-o", "json")
        items = json.loads(listed)["items"]
        return {island.name: self._state(island, items) for island in submitted}

    def _state(self, island: Island, items: Sequence[Mapping[str, Any]]) -> JobState:
        own = [item for item in items if item["metadata"]["labels"].get(ISLAND) == island.name]
        jobs = [item for item in own if item["kind"] == "Job"]
        if not jobs:
            return JobState("gone", detail="it has no Job")
        met = {each["type"]: each for each in jobs[0]["status"].get("conditions", []) if each["status"] == "True"}
        if "Complete" in met:
            return JobState("finished")
        if "Failed" in met:
            return JobState("failed", detail=met["Failed"].get("reason", ""))
        pods = [item for item in own if item["kind"] == "Pod" and "deletionTimestamp" not in item["metadata"]]
        running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        if len(running) < island.nodes:
            return JobState("waiting", detail=f"{len(running)} of {island.nodes} pods run")
        nodes = ",".join(sorted({pod["spec"].get("nodeName", "") for pod in running}))
        return JobState("running", nodes, f"{self._host(island)}:{island.port}")

    def cancel(self, islands: Sequence[Island]) -> None:
        """Delete Jobs, with time to leave, and all but the volumes, which hold the islands' folders."""
        names, within_s = [self.name(island) for island in islands], int(self.options.grace_s) + CALL_S
        gone = ("--ignore-not-found", f"--timeout={within_s}s")
        # of all at once: they leave together, not in turn
        self._call("delete", "job", *names, "--cascade=foreground", *gone, timeout_s=within_s + CALL_S)
        self._call("delete", "service,configmap,secret", *names, *gone, timeout_s=within_s + CALL_S)

    def collect(self, islands: Sequence[Island]) -> dict[str, Path]:
        """Bring what the islands' present pods have printed here."""
        folder, files = self.launch.here / LOGS, {}
        folder.mkdir(parents=True, exist_ok=True)
        for island in [island for island in islands if island.job]:
            own = f"{RUN}={self.launch.config.run},{ISLAND}={island.name}"
            if text := self._call("logs", "-l", own, "--tail=-1", "--prefix", "--ignore-errors"):
                files[island.name] = folder / f"{island.name}.log"
                files[island.name].write_text(text, encoding="utf-8")
        return files

    def _call(self, *words: str, text: str | None = None, timeout_s: float = CALL_S) -> str:
        command = ["kubectl", "--namespace", self.options.namespace, *words]
        return call(command, f"kubectl {words[0]}", "install it", text=text, timeout_s=timeout_s)


def _variables(environment: Mapping[str, str]) -> str:
    given = {"PYTHONUNBUFFERED": "1", **environment}
    return "\n".join(f"- {{name: {json.dumps(name)}, value: {json.dumps(value)}}}" for name, value in given.items())


def _resources(requests: Mapping[str, str | int], gpus: int) -> str:
    """Return a container's resources as YAML. Devices, such as GPUs, can only be limits, which are requests, too."""
    asked = {name: str(value) for name, value in requests.items()} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    limits = {name: value for name, value in asked.items() if "/" in name}
    plain = {name: value for name, value in asked.items() if name not in limits}
    found = {kind: values for kind, values in (("requests", plain), ("limits", limits)) if values}
    return f"resources: {json.dumps(found)}" if found else ""


def _run_volume(name: str, *, kept: bool) -> str:
    what = f"persistentVolumeClaim: {{claimName: {name}}}" if kept else "emptyDir: {}"
    return f"- name: run\n  {what}"
