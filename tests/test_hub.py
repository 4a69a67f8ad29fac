"""Names on the hub: a local HTTP server is the hub, asked by the real library in a process of its own."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trained_run import byte_pairs

from diloco.model.hub import is_hub_name

transformers = pytest.importorskip("transformers")
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """The few answers that a download takes."""

    folder: Path
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/org/model"):
            files = [{"rfilename": file.name, "path": file.name, "type": "file"} for file in self.folder.iterdir()]
            tree = [{**each, "size": (self.folder / each["path"]).stat().st_size, "oid": "0" * 40} for each in files]
            found = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": files, "private": False}
            self.send(200, json.dumps(tree if "/tree/" in path else found).encode(), body=body)
        elif path.startswith("/org/model/resolve/") and (self.folder / Path(path).name).is_file():
            self.send(200, (self.folder / Path(path).name).read_bytes(), body=body)
        else:
            self.send(404, b'{"error": "Repository not found"}', body=body, error="RepoNotFound")

    def send(self, code: int, data: bytes, *, body: bool, error: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what was asked for. The model comes with a program that must never be fetched or run."""
    folder, asked = tmp_path / "hub", list[str]()
    config = transformers.LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_pairs().save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'hacked')!r}, 'w')\n")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Ours", (Hub,), {"folder": folder, "asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


PROGRAM = """
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import DilocoError
from diloco.model.hf import hf_network
for name in ("org/model", "org/model@main", "org/none", "nowhere"):
    try:
        network = hf_network(name, weights="auto", data_vocab=272, sequence=32, seed=0)
        print(network.name, load_tokenizer(name).vocab, sum(value.numel() for _, value in network.initial()) > 0)
    except DilocoError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_model_and_its_tokenizer_come_from_the_hub_without_its_code(hub, tmp_path):
    address, asked = hub
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": root}
    env = {name: value for name, value in env.items() if "proxy" not in name.lower() and name != "HF_HUB_OFFLINE"}

    def ask(**more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second, third, fourth = ask()
    assert first == second == "llama (weights loaded) 272 True"
    assert third.startswith(
        "ModelError model.hf='org/none': there is no such file or folder here, and the hub does not"
    )
    assert "no such folder or config.json; a name on the hub is OWNER/NAME" in fourth
    fetched = {Path(path).name for path in asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not [name for name in fetched if name.endswith((".py", ".bin"))] and not (tmp_path / "hacked").exists()
    again = ask(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert again[0] == first, "what is here needs no hub"


@pytest.mark.parametrize("name", ["org/model", "org/model.v2", "org/model@main", "Org-1/x_y@refs/pr/1", "o/m@v1..2"])
def test_what_a_name_on_the_hub_looks_like(name):
    assert is_hub_name(name)


@pytest.mark.parametrize("revision", ["..", "../../../../secret", "a/../b", "a/..", "/etc", "a//b", "a/", "./a", "."])
def test_a_revision_leads_out_of_no_folder(revision):
    """It becomes part of paths: in the hub's addresses, and in the cache."""
    assert not is_hub_name(f"org/model@{revision}")


@pytest.mark.parametrize(
    "name", ["", "model", "./org/model", "../model", "/org/model", "~/model", "a/b/c", "org/", "-o/m"]
)
def test_other_texts_are_paths_and_ask_nobody(name):
    assert not is_hub_name(name)


def test_a_folder_here_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_name("org/model")
