"""How `diloco launch` starts islands: the section `launch` of the configuration."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from diloco.config.fields import Count, Seconds, Section, Where, key, names


def clock(value: object) -> object:
    """Turn seconds into hours, minutes and seconds: YAML reads a plain 12:00:00 as the number 43200."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return f"{value // 3600}:{value // 60 % 60:02}:{value % 60:02}"


class LaunchConfig(Section):
    """How `diloco launch` starts islands elsewhere; no part of the run itself."""

    dir: str | None = key(
        None, "folder of the islands where they run; null: the run's (local, slurm), diloco/NAME at home (ssh)"
    )
    program: str | None = key(None, "how diloco is called there; null: as here (local, slurm), or `diloco`")
    script: str | None = key(
        None,
        "program that trains by diloco.connect, in place of the built-in trainer, as in python train.py",
        min_length=1,
    )
    port: Annotated[Count, Field(ge=1, le=65000)] = key(
        31337,
        "island K listens at this port + 2 K, and at the next one: open both; local: the next free ones if not set",
    )
    grace_s: Annotated[Seconds, Field(gt=0)] = key(
        120.0, "seconds that an island which is asked to stop has to contribute, save and leave"
    )
    restarts: Count = key(5, "how often an island that fails is started again", ge=0)
    environment: dict[str, str] = key({}, "variables for the islands")
    setup: Annotated[tuple[str, ...], BeforeValidator(names)] = key((), "shell lines that run before diloco")
    modules: Annotated[tuple[str, ...], BeforeValidator(names)] = key((), "slurm: environment modules to load")
    templates: Where | None = key(
        None, "folder whose island.sh, slurm.sh, machine.sh or kubernetes.yaml are used in place of ours"
    )
    partition: str | None = key(None, "slurm: the partition")
    account: str | None = key(None, "slurm: the account")
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$"), BeforeValidator(clock)] | None = key(
        None, "slurm: the time limit, as in 12:00:00 or 2-00:00:00; a plain number is seconds"
    )
    interface: str | None = key(
        None, "slurm: network interface towards the other islands, as in ib0; null: the node's address in Slurm"
    )
    container: str | None = key(None, "slurm: image of the container (srun --container-image)")
    mounts: Annotated[tuple[str, ...], BeforeValidator(names)] = key(
        (), "slurm: what a container sees besides the run's folder, as PATH or PATH:INSIDE"
    )
    extra: Annotated[tuple[str, ...], BeforeValidator(names)] = key((), "slurm: more options of sbatch, each a line")
    namespace: str = key("default", "kubernetes: the namespace")
    image: str | None = key(None, "kubernetes: image of the container, with diloco in it")
    storage: str | None = key(None, "kubernetes: size of each island's volume, as in 100Gi; null: no volume")
    resources: dict[str, str | int] = key({}, "kubernetes: what each pod requests, as in {cpu: 8, memory: 64Gi}")
    hosts: Where | None = key(None, "ssh: file with a host on each line, and where its islands run")
    ssh: str = key("ssh", "ssh: the command, with options: ssh -F FILE", min_length=1)
