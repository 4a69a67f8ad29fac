"""Snapshots and logs at an address: a real S3 endpoint over HTTP, a folder, memory."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from alone import train
from launched import wait_until
from logs import BASE, chain, frozen, opened, settle, take_snapshot, write

from diloco.checkpoint.log.history import HISTORY, read_headers
from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.segments import segment_paths
from diloco.checkpoint.log.snapshot import manifests, read_manifest, read_vectors, snapshots
from diloco.checkpoint.transfer.mirror import Mirror, Remote, restore
from diloco.config.file import load_config
from diloco.elastic.runtime.restoring import points_of
from diloco.errors import RemoteError
from diloco.run.folder import OUTER, has_log
from diloco.run.local import Connection
from diloco.run.start import run as train_in

SERVER = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Moto's S3 server, in a process of its own, with one bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    server = subprocess.Popen([sys.executable, "-c", SERVER.format(port=port)], stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "no S3 server"
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture(params=["s3", "file", "memory"])
def remote(request, endpoint, tmp_path) -> Remote:
    name = f"runs-{os.urandom(4).hex()}"
    if request.param == "s3":
        return Remote(f"s3://bucket/{name}", client_kwargs={"endpoint_url": endpoint})
    return Remote(f"file://{tmp_path}/far/{name}" if request.param == "file" else f"memory://{name}/run")


class Told(list):
    """What a store or a mirror has to say."""

    def __call__(self, what: str, text: str) -> None:
        self.append((what, text))


def mirror_of(folder: Path, remote: Remote, told: Told | None = None, *, every_s: float = 3600) -> Mirror:
    """By default it copies when it is asked to, or closed."""
    return Mirror(folder, remote, folder.name, Told() if told is None else told, every_s=every_s)


def copied(folder: Path, remote: Remote, records=None, *, until: int = 5) -> None:
    """An island that has been copied to an address."""
    island(folder, records or chain(5), until=until)
    mirror_of(folder, remote).close()


def island(folder: Path, records, *, until: int = 5) -> None:
    """A log with a snapshot before its first and after its fourth record."""
    store, _ = opened(folder)
    take_snapshot(store, 0, BASE)
    write(store, records[:3])
    write(store, records[3:4], rotate=True)
    settle(store)
    take_snapshot(store, 4, records[3][0].digest)
    write(store, records[4:until])
    store.close()


def test_an_empty_disk_is_filled_from_a_remote_store_to_the_last_round(tmp_path, remote):
    records = chain(9)
    remote.check()
    for name, until in (("A", 7), ("B", 9)):
        copied(tmp_path / name, remote, records, until=until)
    story = Told()
    manifest = restore(tmp_path / "new", remote, story)
    assert manifest is not None and manifest.round == 4
    (found, path), *more = manifests(tmp_path / "new")
    assert more == []
    assert torch.equal(read_vectors(path, found)["parameters"], frozen(4).vectors["parameters"])
    journal = Journal.read(tmp_path / "new")
    assert [entry.round for entry in journal.chain(found.version)] == [5, 6, 7, 8, 9]  # B's, which leads further
    assert journal.memory is None and journal.troubles == []
    assert [what for what, _ in story] == ["restored"] and "round 9 from" in story[0][1]


def test_only_what_is_closed_is_copied_and_what_is_pruned_here_goes_there(tmp_path, remote):
    records = chain(9)
    store, _ = opened(tmp_path / "A", keep=1)
    take_snapshot(store, 0, BASE)
    write(store, records[:4], rotate=True)
    settle(store)
    mirror = mirror_of(tmp_path / "A", remote)
    mirror.copy(finished=False)
    before = set(remote.sizes())
    assert {name for name in before if "/log-" in name} == {f"A/log-{number:08}.seg" for number in range(1, 5)}
    assert any(name.startswith("snapshot-00000000") for name in before)
    take_snapshot(store, 4, records[3][0].digest)
    write(store, records[4:])
    settle(store)
    mirror.copy(finished=False)
    now = set(remote.sizes())
    assert {name.split("-")[1] for name in now if name.startswith("snapshot-")} == {"00000004"}
    assert {name for name in now if "/log-" in name} == set()  # the only segment left is being written
    store.close()
    mirror.close()
    assert {name for name in remote.sizes() if "/log-" in name} == {"A/log-00000005.seg"}


def test_an_upload_that_was_cut_short_is_done_again(tmp_path, remote):
    island(tmp_path / "A", chain(5))
    mirror = mirror_of(tmp_path / "A", remote)
    mirror.copy(finished=True)
    sizes = remote.sizes()
    name = next(name for name in sizes if "/log-" in name)
    (tmp_path / "short").write_bytes(b"half")
    remote.push(tmp_path / "short", name)
    manifest = next(name for name in sizes if name.endswith("manifest.json"))
    remote.remove(manifest)
    mirror.close()
    assert remote.sizes() == sizes


@pytest.mark.parametrize("file", ["manifest.json", "parameters-00000.safetensors"])
def test_damage_in_a_remote_store_is_told_of_and_an_older_snapshot_serves(tmp_path, file):
    far, story = tmp_path / "far", Told()
    remote = Remote(f"file://{far}")
    copied(tmp_path / "A", remote)
    damaged = max(far.glob("snapshot-*")) / file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    manifest = restore(tmp_path / "new", remote, story)
    assert manifest is not None and manifest.round == 0
    assert [what for what, _ in story] == ["damaged", "restored"] and file in story[0][1]
    assert [entry.round for entry in Journal.read(tmp_path / "new").chain(BASE)] == [1, 2, 3, 4, 5]


def test_a_log_with_a_wrong_result_does_not_take_the_place_of_one_that_leads_further(tmp_path):
    """Whole by its checksums, but not what its record says."""
    records, story = chain(9), Told()
    wrong = [(record, b"wrong" if record.round == 6 else payload) for record, payload in records]
    remote = Remote(f"file://{tmp_path}/far")
    for name, of, until in (("A", records, 7), ("B", wrong, 9)):
        copied(tmp_path / name, remote, of, until=until)
    restore(tmp_path / "new", remote, story)
    assert [entry.round for entry in Journal.read(tmp_path / "new").chain(records[3][0].digest)] == [5, 6, 7]
    assert "round 7 from" in story[0][1] and story[0][1].endswith("and 3 rounds after it")


def test_the_snapshot_of_the_heaviest_branch_is_restored_whatever_its_round(tmp_path):
    store, _ = opened(tmp_path / "A")
    take_snapshot(store, 9, BASE, (100, 9))
    store.follow("b" * 64, 7)
    take_snapshot(store, 7, "b" * 64, (200, 7))
    store.close()
    remote = Remote(f"file://{tmp_path}/far")
    mirror_of(tmp_path / "A", remote).close()
    manifest = restore(tmp_path / "new", remote, Told())
    assert manifest is not None and manifest.round == 7
    assert [path.name for path in (tmp_path / "new").iterdir() if path.is_dir()] == ["snapshot-00000007-bbbbbbbb"]


def test_what_is_pruned_while_it_is_copied_is_no_failure(tmp_path, monkeypatch):
    story = Told()
    island(tmp_path / "A", chain(5))
    remote = Remote(f"file://{tmp_path}/far", tries=1)
    mirror = mirror_of(tmp_path / "A", remote, story)
    paths = segment_paths(tmp_path / "A")
    paths[0].unlink()
    with monkeypatch.context() as before:
        before.setattr("diloco.checkpoint.transfer.mirror.segment_paths", lambda folder: paths)
        mirror.close()
    assert story == [] and restore(tmp_path / "new", remote, Told()) is not None


def test_nothing_there_is_nothing_restored(tmp_path, remote):
    assert restore(tmp_path / "new", remote, Told()) is None
    assert list((tmp_path / "new").iterdir()) == []


def test_a_wrong_bucket_is_named_at_once(endpoint):
    remote = Remote("s3://no-such-bucket/run", client_kwargs={"endpoint_url": endpoint}, wait=pytest.fail)
    with pytest.raises(RemoteError, match=r"s3://no-such-bucket/run cannot be written to .*bucket"):
        remote.check()


def test_missing_credentials_are_named_at_once(endpoint, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    options = {"client_kwargs": {"endpoint_url": endpoint}, "skip_instance_cache": True}
    with pytest.raises(RemoteError, match=r"s3://bucket/run cannot be written to \(.*redentials"):
        Remote("s3://bucket/run", wait=pytest.fail, **options).check()


def test_a_store_that_is_away_is_asked_again_told_of_once_and_caught_up_with(tmp_path):
    """The endpoint is down, then up."""
    far, story, waits = tmp_path / "far", Told(), []
    far.write_text("in the way")
    island(tmp_path / "A", chain(5))
    remote = Remote(f"file://{far}/run", tries=3, wait=waits.append)
    mirror = mirror_of(tmp_path / "A", remote, story, every_s=0.05)
    assert wait_until(lambda: len(waits) >= 6)
    assert waits[:2] == [0.5, 1.0]  # with growing patience
    far.unlink()
    assert wait_until(lambda: len(story) >= 2)
    mirror.close()
    assert [what for what, _ in story] == ["remote failing", "remote again"]
    assert restore(tmp_path / "new", remote, Told()) is not None


def test_an_address_that_nobody_knows():
    with pytest.raises(RemoteError, match=r"checkpoint.remote=what://ever is no address that fsspec knows"):
        Remote("what://ever")


def test_a_shard_outside_of_its_folder_is_refused(tmp_path):
    """Whoever may write to a bucket may not write to our disk."""
    far = tmp_path / "far"
    remote = Remote(f"file://{far}")
    copied(tmp_path / "A", remote)
    for snapshot in far.glob("snapshot-*"):
        evil(snapshot / "manifest.json")
    story = Told()
    assert restore(tmp_path / "new", remote, story) is None
    assert all("names a file outside of it" in text for _, text in story) and len(story) == 2


def evil(path: Path) -> None:
    """A manifest with a right digest."""
    manifest = read_manifest(path.parent)
    shards = tuple(replace(shard, file=f"../../{shard.file}") for shard in manifest.shards)
    path.write_bytes(replace(manifest, shards=shards).encode())


def test_an_island_that_trains_leaves_its_snapshots_and_its_log_there(small, tmp_path):
    far = tmp_path / "far"
    config = small(checkpoint={"remote": f"file://{far}", "snapshot_every": 1}, elastic={"silence_s": 1})
    train_in(config, Connection("127.0.0.1", name="island-1"))
    (run,) = far.glob(f"{config.run}-*")
    own = Path(config.dir) / OUTER
    assert [path.name for path in snapshots(run)] == [path.name for path in snapshots(own)] != []
    (log,) = {path.parent for path in run.glob("*/log-*.seg")}
    assert {path.name: path.read_bytes() for path in log.iterdir()} == {
        path.name: path.read_bytes() for path in (*segment_paths(own), own / HISTORY)
    }
    assert restore(tmp_path / "new", Remote(f"file://{run}"), Told()) is not None
    assert read_headers(tmp_path / "new") == read_headers(own) != []


def test_a_remote_store_that_cannot_be_used_is_refused_before_anything_is_trained(small, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.transfer.mirror.FIRST_WAIT_S", 0.0)
    (tmp_path / "far").write_text("in the way")
    config = small(checkpoint={"remote": f"file://{tmp_path}/far"})
    with pytest.raises(RemoteError, match=r"far/.* cannot be written to \(.*: create the bucket"):
        train_in(config, Connection("127.0.0.1", name="island-1"))
    assert not has_log(Path(config.dir))


def test_the_log_of_an_island_alone_is_copied_too(small, tmp_path):
    train(small(checkpoint={"remote": f"file://{tmp_path}/far"}))
    assert list((tmp_path / "far").glob("*/*/log-*.seg")) or list((tmp_path / "far").glob("*/log-*.seg"))


def with_history(folder: Path, size: int) -> None:
    island(folder, chain(5))
    (folder / HISTORY).write_bytes(os.urandom(size))


@pytest.mark.parametrize("size", [1, 99, 100, 101, 250, 300])
def test_a_history_is_copied_in_pieces_and_only_the_last_one_again(tmp_path, monkeypatch, size):
    monkeypatch.setattr("diloco.checkpoint.transfer.mirror.HISTORY_PIECE", 100)
    own, far = tmp_path / "A", tmp_path / "far"
    with_history(own, size)
    remote = Remote(f"file://{far}")
    mirror = mirror_of(own, remote)
    mirror.copy(finished=True)
    before = {path.name: path.stat().st_mtime_ns for path in (far / "A").glob(f"{HISTORY}*")}
    with (own / HISTORY).open("ab") as file:
        file.write(os.urandom(120))
    mirror.close()
    after = {path.name: path.stat().st_mtime_ns for path in (far / "A").glob(f"{HISTORY}*")}
    assert len(after) == -(-(size + 120) // 100)
    assert len([name for name, at in before.items() if after[name] == at]) == size // 100
    assert restore(tmp_path / "new", remote, Told()) is not None
    assert (tmp_path / "new" / HISTORY).read_bytes() == (own / HISTORY).read_bytes()


class Fading(Remote):
    """One in which an object goes while somebody restores."""

    def pull(self, name: str, local: Path) -> None:
        if name.endswith(f"{HISTORY}.1"):
            self.remove(name)
        super().pull(name, local)


def test_a_history_that_cannot_be_read_does_not_keep_a_state_from_being_restored(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.transfer.mirror.HISTORY_PIECE", 100)
    with_history(tmp_path / "A", 250)
    remote, story = Fading(f"file://{tmp_path}/far", tries=1), Told()
    mirror_of(tmp_path / "A", remote).close()
    assert restore(tmp_path / "new", remote, story) is not None
    assert [what for what, _ in story] == ["remote failing", "restored"] and f"{HISTORY}.1" in story[0][1]
    assert not [path.name for path in (tmp_path / "new").iterdir() if "history" in path.name]


@pytest.fixture(params=["s3", "file"])
def far(request, endpoint, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    name = f"runs-{os.urandom(4).hex()}"
    return f"s3://bucket/{name}" if request.param == "s3" else f"file://{tmp_path}/far/{name}"


def test_a_run_comes_back_from_its_copy_and_goes_on_under_a_new_key(small, tmp_path, far, command):
    config = small(checkpoint={"remote": far, "snapshot_every": 1}, elastic={"silence_s": 1})
    train_in(config, Connection("127.0.0.1", name="island-1"))
    own, back = Path(config.dir), tmp_path / "back"
    (head, *_) = sorted((point.end.head for point in points_of(own / OUTER, Journal.read(own / OUTER))), reverse=True)
    assert [name for name in Remote(far).sizes() if name.endswith(".key")] == []
    said = command("restore", far, back)
    assert said.code == 0 and "whole: 1 snapshot," in said.out and f"diloco rewind {back} {head.round}" in said.out
    assert sorted(path.name for path in back.iterdir()) == ["config.yaml", OUTER]
    assert (back / OUTER / "genesis.json").read_bytes() == (own / OUTER / "genesis.json").read_bytes()
    assert max(point.end.head for point in points_of(back / OUTER, Journal.read(back / OUTER))) == head
    assert "already exists" in command.refused("restore", far, back)
    assert command("log", back, "--verify").code == 0
    assert f"of step {config.inner.steps}, round {head.round}, as qwen3" in command("export", back, "exported").out
    assert command("sample", back, "def", "--tokens", "4").out == command("sample", own, "def", "--tokens", "4").out
    assert sorted(path.name for path in back.iterdir()) == ["config.yaml", OUTER]  # looking changes nothing
    command("rewind", back, head.round, tmp_path / "on", "--set", "inner.steps=16")
    again = load_config(tmp_path / "on" / "config.yaml", [])
    outcome = train_in(again, Connection("127.0.0.1", name="island-1"), resume=True)
    assert outcome.finished and outcome.step == 16


def test_what_cannot_be_restored_is_refused_with_the_address(tmp_path, endpoint, monkeypatch, command):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    out = tmp_path / "back"
    assert "s3://no-such-bucket/runs cannot be read" in command.refused("restore", "s3://no-such-bucket/runs", out)
    assert "s3://bucket/nothing holds no run" in command.refused("restore", "s3://bucket/nothing", out)
    remote = Remote(f"file://{tmp_path}/far/one")
    copied(tmp_path / "A", remote)
    assert "one/genesis.json is damaged or missing" in command.refused("restore", remote.url, out)
    mirror_of(tmp_path / "A", Remote(f"file://{tmp_path}/far/two")).close()
    assert "holds several runs, choose one: file://" in command.refused("restore", f"file://{tmp_path}/far", out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "back"))] == []
