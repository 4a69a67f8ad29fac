"""Launching a run: secrets are made first, then files are rendered, then a backend submits them.

Everything can be done again: a launch that was interrupted, or whose islands have ended, starts those islands that are
not running, with the same secrets.
"""

import fcntl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from diloco.atomic import write_file
from diloco.config.schema import Config
from diloco.errors import LaunchError
from diloco.launch.backend import CONFIG, SECRETS, Backend, Island, JobState, Launch, backend_of, new_islands
from diloco.run.invites import SECRET
from diloco.run.secret import FOUNDER, IslandSecret, make_secrets

LOCK = "lock"  # in RUN/launch, while somebody launches
AT_WORK, FINISHED = ("waiting", "running"), "finished"


def plan_launch(config: Config, backend: str, *, islands: int, nodes: int, gpus: int) -> Launch:
    """Return what would be launched, with every address that is known beforehand. Nothing is written."""
    return placed(Launch(Path(config.dir), config, backend, new_islands(config, 0, islands, nodes=nodes, gpus=gpus)))


def plan_join(
    launch: Launch, *, islands: int, nodes: int | None = None, gpus: int | None = None
) -> tuple[Launch, tuple[Island, ...]]:
    """Return a launch with islands added, and these; they are like the first one where nothing else is asked for."""
    first, like = 1 + max(island.number for island in launch.islands), launch.islands[0]
    nodes, gpus = nodes or like.nodes, like.gpus if gpus is None else gpus
    added = new_islands(launch.config, first, islands, nodes=nodes, gpus=gpus)
    larger = placed(launch.having(added))
    return larger, tuple(island for island in larger.islands if island.number >= first)


def placed(launch: Launch) -> Launch:
    """Return a launch whose islands have those addresses that are known before they are submitted."""
    return launch.having(backend_of(launch).place([island for island in launch.islands if not island.address]))


def start(launch: Launch) -> tuple[Launch, tuple[Island, ...]]:
    """Start all islands of a launch that are not at work, and return which those were; secrets are made once."""
    if not (launch.here / CONFIG).exists():
        if [*launch.folder.glob("identity.key"), *launch.folder.glob("island-*/identity.key")]:
            raise LaunchError(
                f"{launch.folder} already holds a run that was not launched: set run=NAME for another one"
            )
        backend_of(launch).check(launch.islands)  # before anything is written
    with _alone(launch):
        idle = launch.islands
        if (launch.here / CONFIG).exists():
            launch = _again(launch)
            idle = tuple(backend_of(launch).place(_idle(launch)))  # a host may be gone, or have another address
            launch = launch.having(idle)
            backend_of(launch).check(idle)
        _write_secrets(launch)
        launch.write()
        write_file(launch.folder / CONFIG, launch.island_config_text)  # by it a folder is known as a run
        return submit(launch, backend_of(launch), idle), idle


def _idle(launch: Launch) -> tuple[Island, ...]:
    """Return the islands that are to be started: all that are not at work; none when one has seen the run's end, for
    nobody is left whom another could catch up from."""
    present = {name: job.state for name, job in backend_of(launch).states().items()}
    if FINISHED in present.values():
        return ()
    return tuple(i for i in launch.islands if not i.cancelled and present.get(i.name) not in AT_WORK)


@contextmanager
def _alone(launch: Launch) -> Iterator[None]:
    """Keep other launchers out: two at once would make two sets of secrets, and submit islands twice.

    The folder is for nobody else: variables in job files and in the configuration may be keys of other services.
    """
    launch.here.mkdir(parents=True, exist_ok=True)
    launch.here.chmod(0o700)
    with (launch.here / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another `diloco launch` is at work on {launch.folder}: try again when it is done"
            ) from None
        yield


def _again(launch: Launch) -> Launch:
    """Return what was launched here before, if it is the same."""
    before = Launch.read(launch.folder)
    if before.backend != launch.backend or before.config != launch.config:
        raise LaunchError(
            f"{launch.folder} was launched on {before.backend} with its own configuration, {launch.config_file}: "
            "use that, or set run=NAME for another run"
        )
    if len(before.islands) < len(launch.islands):
        raise LaunchError(
            f"{launch.folder} was launched with {len(before.islands)} islands: "
            f"add some with `diloco launch --join {launch.folder} --islands N`"
        )
    return before


def add(launch: Launch, added: Sequence[Island]) -> Launch:
    """Make the secrets of islands that were added to a launched run, and start them."""
    backend = backend_of(launch)
    backend.check(added)
    with _alone(launch):
        if {island.name for island in added} & {island.name for island in Launch.read(launch.folder).islands}:
            raise LaunchError(f"islands were added to {launch.folder} by somebody else meanwhile: try again")
        if FINISHED in {job.state for job in backend.states().values()}:
            raise LaunchError(
                f"{launch.folder} is finished: nobody is left to join; `diloco rewind` makes a run of it that trains on"
            )
        names = [island.name for island in added]
        files = [launch.secret_file(island.name) for island in launch.islands if island.name not in names]
        _keep(launch, make_secrets(names, _addresses(launch), [IslandSecret.read(file) for file in files]))
        launch.write()
        return submit(launch, backend, added)


def submit(launch: Launch, backend: Backend, islands: Sequence[Island]) -> Launch:
    """Write the files of these islands' jobs, submit them, and remember what they are called."""
    if not islands:
        return launch
    write_files(launch, backend.render(islands))
    jobs = backend.submit(islands)
    launch = launch.having(replace(island, job=jobs[island.name]) for island in islands)
    launch.write()
    return launch


def write_files(launch: Launch, files: Mapping[str, str]) -> None:
    """Write rendered files below RUN/launch."""
    for name, text in files.items():
        path = launch.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)


def cancel(launch: Launch, names: Sequence[str]) -> dict[str, Path]:
    """End islands for good: they contribute, save and leave, and are not started again. Return where what they printed
    lies, which is brought here first."""
    ending = [launch.island(name) for name in names]
    logs = end(launch, ending)
    with _alone(launch):
        launch = Launch.read(launch.folder)  # others may have been added meanwhile
        launch = launch.having(replace(launch.island(name), cancelled=True) for name in names)
        launch.write()
    return logs


def end(launch: Launch, islands: Sequence[Island]) -> dict[str, Path]:
    """End islands, and return where what they printed lies. Launching the run again continues it."""
    backend = backend_of(launch)
    logs = backend.collect(islands)
    backend.cancel(islands)
    return logs


def states_of(launch: Launch) -> dict[str, JobState]:
    """Return how each island's job is, as whoever runs it says."""
    return backend_of(launch).states()


def _addresses(launch: Launch) -> dict[str, str]:
    return {island.name: island.address for island in launch.islands if island.address}


def _write_secrets(launch: Launch) -> None:
    """Write the configuration and the secrets of a new launch; those of an earlier one stay as they are."""
    folder = launch.here / SECRETS
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not launch.secret_file(FOUNDER).exists():  # it is written last: the others are made anew with it
        _keep(launch, reversed(make_secrets([island.name for island in launch.islands], _addresses(launch))))
    if not launch.config_file.exists():
        write_file(launch.config_file, launch.config_text, mode=SECRET)


def _keep(launch: Launch, secrets: Iterable[IslandSecret]) -> None:
    for secret in secrets:
        secret.write(launch.secret_file(secret.island))
