"""The errors that people are most likely to meet: each has its code, what happened and what to do, and the page on
troubleshooting has a section for it. Real commands, in this process where that is enough."""

import re
import socket
from pathlib import Path

import pytest
import yaml
from conftest import SMALL

from diloco import errors
from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity
from diloco.errors import DilocoError
from diloco.run.invites import make_ticket

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()

DATA = {kind: f"run run.yaml --set data.source={kind} --set data.path=" for kind in ("text", "tokens")}
# what is typed, the code, what happened, what to do
WALK = {
    "no such file": ("run none.yaml", "config", "none.yaml: no such file", "diloco init none.yaml"),
    "no YAML": ("run bad.yaml", "config", "bad.yaml, line 2: not valid YAML", ""),
    "a wrong key": ("run run.yaml --set sync.evry=5", "config", "there is no such key", "did you mean sync.every?"),
    "a wrong value": ("run run.yaml --set inner.lr=fast", "config", "inner.lr='fast'", "write"),
    "one of several": ("run run.yaml --set inner.schedule=cosin", "config", "must be one of", "did you mean 'cosine'?"),
    "warm-up": ("run run.yaml --set inner.warmup=99", "config", "must be below inner.steps", "train longer"),
    "batch": ("run run.yaml --set island.fsdp=3", "config", "cannot be divided by", "use a multiple of 3"),
    "delay": ("run run.yaml --set sync.delay=60", "config", "must be below sync.every", "use sync.apply=eager"),
    "both": ("run run.yaml --resume --fresh", "config", "--fresh starts over", "use one of them"),
    "alone": ("run run.yaml --link 10mbit,1ms", "config", "this one is alone", "add --islands"),
    "unit": ("run run.yaml --islands 1 --link 20,40ms", "config", "the unit is missing", "such as 20mbit"),
    "no data": ("{text}gone.txt", "data", "gone.txt does not exist", ""),
    "no text": ("{text}empty", "data", "no text files below", "name other files"),
    "no tokens": ("{tokens}run.yaml", "data", "not a token file", "diloco tokenize"),
    "little data": ("{text}a.txt", "data", "tokens", "use more data"),
    "tokenizer": (
        "{text}a.txt --set data.tokenizer=gone", "data",
        "neither 'bytes' nor a local folder", "OWNER/NAME",
    ),
    "model": ("run run.yaml --set model={{\"hf\":\"gone\"}}", "model", "no such folder", "OWNER/NAME"),
    "no GPU": ("run run.yaml --set island.device=cuda", "device", "torch sees no CUDA device", "island.device"),
    "run again": ("run again.yaml", "save", "already holds a run", "add --resume"),
    "nothing to resume": ("run run.yaml --resume", "save", "holds no save to resume from", "start without --resume"),
    "not ours": ("run mine.yaml", "save", "is not a diloco run", "set checkpoint.dir"),
    "no such run": ("sample gone hello", "save", "no such run", "give the folder"),
    "no log": ("log gone", "save", "no log there", "give the folder"),
    "no such round": ("log again --checkout 99 out", "save", "does not lead to round 99", "diloco log --verify"),
    "exported": ("export again exported", "save", "holds an earlier export", "add --force"),
    "into itself": ("export again again/out", "save", "is inside the run", "name a folder somewhere else"),
    "no ticket": ("join nonsense", "ticket", "no file holds one there", "begins with diloco"),
    "half a ticket": ("join diloco2-abcdef", "ticket", "ticket", ""),
    "nobody else": ("ticket show again", "save", "holds no ticket", ""),
    "at the end": ("set again inner.lr=0.5", "config", "the run is at its end", "add inner.steps="),
    "not changeable": ("set again model.width=64", "config", "part of what the run is", "start another run"),
    "past": ("set again inner.steps=3", "config", "the run is at step 12 already", ""),
    "no copy": ("restore file:///no/such/place back", "remote", "file:///no/such/place", ""),
    "folder taken": ("restore file:///no/such/place again", "save", "already exists", "name a new folder"),
    "rewind": ("rewind again 12", "save", "does not lead to round 12", "diloco log --verify"),
    "key": ("key import open.key new", "identity", "others can read the key file", "chmod 600"),
    "no Slurm": ("launch run.yaml --on slurm --islands 2", "launch", "sbatch", ""),
    "plan": ("plan", "config", "give a CONFIG", "--layers"),
    "hours": ("join {ticket} --hours 25-3", "config", "--hours 25-3", "such as 22-7"),
    "month": ("join {ticket} --max-month 50", "config", "the unit is missing", "such as 50GB"),
    "no nvidia-smi": ("join {ticket} --yield-gpu", "device", "it is not installed here", "leave that out"),
}  # fmt: skip


@pytest.fixture
def shop(run, tmp_path, command, monkeypatch):
    """A folder with what the walk needs: a finished run, and things that are not as they should be."""
    run.rename(tmp_path / "again")
    written = {**SMALL, "inner": {**SMALL["inner"], "warmup": 2}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**written, "run": "new"}))
    (tmp_path / "again.yaml").write_text(yaml.safe_dump({**written, "checkpoint": {"dir": "again"}}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**written, "checkpoint": {"dir": "empty"}}))
    (tmp_path / "bad.yaml").write_text("run: a\n  b: [")
    (tmp_path / "a.txt").write_text("little")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "thesis.pdf").touch()
    (tmp_path / "open.key").write_bytes(b"key")
    (tmp_path / "open.key").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))  # neither sbatch nor nvidia-smi
    return command


def ticket_of_nobody(tmp_path: Path) -> Path:
    owner, peer = (Identity.load(tmp_path / f"{name}.key") for name in ("owner", "peer"))
    places = (f"/ip4/127.0.0.1/tcp/9/p2p/{peer.peer_id}",)
    made = make_ticket(tmp_path, owner, places, peer=None, right=Right.CONTRIBUTE, lifetime_s=3600, islands=1)
    (tmp_path / "ticket").write_text(made.render())
    return tmp_path / "ticket"


def test_the_thirty_most_likely_errors_say_what_happened_and_what_to_do(shop, tmp_path):
    assert shop("export", "again", "exported").code == 0
    ticket, wrong = ticket_of_nobody(tmp_path), {}
    assert len(WALK) >= 30
    for name, (typed, code, happened, todo) in WALK.items():
        said = shop(*typed.format(ticket=ticket, **DATA).split())
        line = said.err.strip()
        as_it_should = said.code == 2 and "\n" not in line and line.startswith(f"error[{code}]: ")
        if not as_it_should or happened not in line or todo not in line:
            wrong[name] = line or said.out
        if f"### error[{code}]" not in PAGE:
            wrong[name] = f"docs/troubleshooting.md has no section error[{code}]"
    assert wrong == {}


def test_a_port_that_is_taken_is_named(shop):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = shop.refused("run", "run.yaml", "--islands", "1", "--port", port)
    assert re.match(r"error\[(directory|config)\]: .*port", told), told


def test_every_code_is_one_word_and_no_two_errors_share_one():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DilocoError)]
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(codes) and all(re.fullmatch("[a-z-]+", code) for code in codes)
