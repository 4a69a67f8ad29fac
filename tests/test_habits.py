"""What people expect of any command line: completion in their shell, a configuration to begin with, a demo."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from trained_run import byte_pairs

from diloco.cli import demo
from diloco.config.file import load_config
from diloco.report.events import Round
from diloco.report.sinks import JsonLines

EXAMPLES = Path(__file__).parent.parent / "examples"
CANDIDATES = {
    "diloco rewi": ["rewind"],
    "diloco ticket rev": ["revoke"],
    "diloco sample qui": ["quickstart"],
    "diloco run run.yaml --set inner.l": ["inner.lr="],
    "diloco run --islan": ["--islands"],
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, of which one has a hostile name, and the program on PATH."""
    folder = tmp_path_factory.mktemp("shop")
    program = folder / "bin" / "diloco"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'diloco'\nfrom diloco.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    for name in ("quickstart", "qui$(touch hacked)", "qui'; touch hacked; '"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").touch()
    return folder


def environment(shop: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{shop / 'bin'}:{os.environ['PATH']}", "HOME": str(shop), "TERM": "dumb",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }  # fmt: skip


def shell(shop: Path, *command: str) -> list[str]:
    done = subprocess.run(command, cwd=shop, env=environment(shop), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_bash_completes_commands_runs_and_settings(shop):
    asks = "".join(
        f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _diloco_completion diloco; "
        'echo "${COMPREPLY[@]}"; '
        for words in CANDIDATES
    )
    found = shell(shop, "bash", "--norc", "-c", f"source <(diloco completion bash); {asks}")
    assert [line.split() for line in found] == list(CANDIDATES.values())
    assert not (shop / "hacked").exists()


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_runs_and_settings(shop):
    asks = "".join(f"; complete -C '{words}'; echo" for words in CANDIDATES)
    found = "\n".join(shell(shop, "fish", "--no-config", "-c", f"diloco completion fish | source{asks}"))
    listed = [[line.split("\t")[0] for line in part.split("\n") if line] for part in found.split("\n\n")]
    assert listed == list(CANDIDATES.values())
    assert not (shop / "hacked").exists()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_commands_runs_and_settings(shop):
    """Only an interactive one completes: each line is typed at a terminal up to the tab, and then printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(shop)
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment(shop))
    try:
        type_at(terminal, "unsetopt zle_bracketed_paste; PS1='' ; autoload -U compinit && compinit -u -D\n")
        type_at(terminal, "source <(diloco completion zsh); echo rea''dy\n", until="ready")
        for words, (expected,) in CANDIDATES.items():
            type_at(terminal, f"{words}\t", until=f"{words.split()[-1]}.*{expected[len(words.split()[-1]) :]}")
            type_at(terminal, "\x15echo do''ne\n", until="done")
        type_at(terminal, "exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert not (shop / "hacked").exists()


def type_at(terminal: int, text: str, until: str = "") -> None:
    """Type, and read until a pattern has been printed; the test's own time limit ends it otherwise."""
    os.write(terminal, text.encode())
    shown = ""
    while until and not re.search(until, shown, re.DOTALL):
        shown += os.read(terminal, 4096).decode(errors="replace")


def test_completion_asks_for_a_shell_that_it_knows(command):
    said = command("completion", "tcsh")
    assert said.code == 2 and "bash" in said.err and "fish" in said.err


# init


@pytest.mark.parametrize("islands", [1, 3])
def test_init_writes_a_commented_file_that_runs_as_it_is(command, tmp_path, islands):
    said = command("init", "first.yaml", "--islands", islands)
    start = "diloco run first.yaml" + (" --islands 3" if islands > 1 else "")
    assert said.code == 0 and said.out.startswith(f"first.yaml is written\nnext:\n  {start}\n")
    text = Path("first.yaml").read_text()
    assert text.startswith(f"# {start}\n") and all("#" in line for line in text.splitlines() if line)
    config = load_config("first.yaml")
    assert config.run == "first" and config.elastic.start_islands == islands
    trained = command(
        "run", "first.yaml", "--set", "inner.steps=41", "--set", "model.width=16", "--set", "sync.every=20"
    )
    assert trained.code == 0 and "done: step 41" in trained.out


def test_init_recognises_what_the_data_is(command, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("some text\n" * 9)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    assert command("tokenize", "notes", "--out", "notes.tokens").code == 0
    kinds = {"notes": "text", "notes/a.txt": "text", "rows.jsonl": "hf", "notes.tokens": "tokens", "org/data": "hf"}
    for data, source in kinds.items():
        assert command("init", "run.yaml", "--force", "--data", data).code == 0
        assert yaml.safe_load(Path("run.yaml").read_text())["data"] == {"source": source, "path": data, "sequence": 128}


def test_init_takes_a_model_with_its_tokenizer_and_its_length(command, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    byte_pairs().save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("text")
    assert command("init", "--model", "model", "--data", "a.txt").code == 0
    written = yaml.safe_load(Path("run.yaml").read_text())
    assert written["model"] == {"hf": "model"}
    assert written["data"] == {"source": "text", "path": "a.txt", "tokenizer": "model", "sequence": 64}


def test_init_takes_a_name_on_the_hub_as_the_model_does_and_no_slip(command, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert command("init", "--model", "org/model@refs/pr/1", "--data", "a.txt").code == 0
    written = yaml.safe_load(Path("run.yaml").read_text())
    assert written["model"]["hf"] == written["data"]["tokenizer"] == "org/model@refs/pr/1"
    for slip in ("35M", "gpt2", "org/model@../../secret", "-o/model"):
        assert "OWNER/NAME" in command.refused("init", "a.yaml", f"--model={slip}", "--data", "a.txt")


def test_init_never_writes_over_a_file_unasked_and_says_what_it_does_not_find(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("run: mine\n")
    assert "exists already" in command.refused("init", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "run: mine\n"
    assert "neither tiny, 35m" in command.refused("init", "a.yaml", "--model", "no/such/folder")
    assert "no such file or folder" in command.refused("init", "a.yaml", "--data", "./nothing")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("no json")
    assert "not the config.json of a model" in command.refused(
        "init", "a.yaml", "--model", "bad", "--data", "mine.yaml"
    )
    assert "plain bytes" in command.refused("init", "a.yaml", "--model", "org/model")
    assert not (tmp_path / "a.yaml").exists()
    assert "diloco init none.yaml writes one" in command.refused("run", "none.yaml")
    assert "to see one key: diloco config | grep lr" in command.refused("config", "inner.lr")


# the demo


def test_the_demo_kills_an_island_when_all_have_trained_together_and_waits_for_it(monkeypatch, capsys, tmp_path):
    killed = []
    monkeypatch.chdir(tmp_path)
    events = tmp_path / "runs" / "demo" / "island-1" / "events.jsonl"
    events.parent.mkdir(parents=True)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / "runs" / "demo" / "islands.json").write_text(f'[{{"name": "island-3", "pid": {victim.pid}}}]')
    everybody = ["island-1", "island-2", "island-3", "island-4"]
    told = [everybody[:2], everybody, everybody, [*everybody[:2], "island-4"], everybody]
    story, sink = demo.Story(), JsonLines(events)
    for number, names in enumerate(told, 1):
        sink.emit(Round(round=number, contributors=tuple(names), step=number, digest="00"))
        story.look()
        if number == 3:
            killed.append(victim.wait(60))
    assert killed == [-9] and story.complete and (story.without, story.back) == ([4], [5])
    shown = capsys.readouterr().out
    assert "round 4 is complete without island-3" in shown and "island-3 is back" in shown


def test_the_demo_s_configuration_is_the_one_of_the_examples(tmp_path):
    (tmp_path / "demo.yaml").write_text(demo.CONFIG)
    ours, theirs = (load_config(path, ["run=same"]) for path in (tmp_path / "demo.yaml", EXAMPLES / "islands.yaml"))
    assert ours == theirs


def test_the_demo_s_second_half_needs_what_its_report_needs(monkeypatch, capsys):
    monkeypatch.setattr(demo, "SLOW_LINK", [sys.executable, "-c", "print('simulated')"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert demo.slow_link() == 0 and "simulated" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert demo.slow_link() == 0
    said = capsys.readouterr().out
    assert "with plotly this goes on" in said and "simulated" not in said
