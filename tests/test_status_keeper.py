"""Who keeps an island's status: it tells how the island ended, ends nothing itself, and waits for nobody."""

import json
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from launched import wait_until
from own_loops import made, run_of, train_all
from situations import Situation
from team import HERE, PATIENT, introduced, own_folder, own_loop_driver

import diloco
from diloco.cli.status import why
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import parse_config
from diloco.errors import TransportError
from diloco.history.present import find_islands, status_of
from diloco.island.user_model import OwnModel
from diloco.report.events import IslandNews
from diloco.report.sinks import EVENTS
from diloco.report.status import ASKED, STATUS, IslandStatus, RunStatus, merged, read_status
from diloco.run.local import Connection
from diloco.run.status import StatusKeeper, write_status
from diloco.run.status_streams import AGE, ANSWER, CHANNEL


def test_the_last_status_has_the_last_round_and_that_the_island_left_in_good_order(tmp_path):
    model = made()
    with diloco.connect(run_of(tmp_path), model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
        train_all(run, model)
    last = read_status(tmp_path / "run")
    assert last is not None and last.ended and last.finished and not last.failed
    assert (last.round, last.step) == (run.rounds.driver.applied.head.round, 12)


def test_news_of_peers_give_a_terminal_no_orders(tmp_path, capsys):
    where = run_of(tmp_path, inner={"steps": 4})
    model, folder = made(), tmp_path / "run"
    with diloco.connect(where, model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
        train_all(run, model)
    last = read_status(folder)
    two = replace(last.own, island="id-2", name="two", told_by="two", member=False)
    write_status(folder, replace(last, ended=False, islands=(last.own, two)))
    news = IslandNews(what="kept out", island="two", text="\x1b[2J", time=time.time())
    with (folder / EVENTS).open("a") as file:
        file.write(json.dumps(news.plain()) + "\n")
    capsys.readouterr()
    why(str(folder), "two")
    printed = capsys.readouterr().out
    assert "\ufffd[2J" in printed and "\x1b" not in printed


def test_a_disk_that_takes_no_status_is_told_of_once_and_again_when_it_is_another_trouble(tmp_path, caplog):
    status = RunStatus("r", "id-1", time.time())
    refused = write_status(tmp_path / "missing", status)
    assert "No such file" in refused and len(caplog.messages) == 1
    assert write_status(tmp_path / "missing", status, told=refused) == refused and len(caplog.messages) == 1
    (tmp_path / STATUS).mkdir()
    other = write_status(tmp_path, status, told=refused)
    assert other != refused and len(caplog.messages) == 2
    (tmp_path / STATUS).rmdir()
    assert write_status(tmp_path, status, told=other) == "" and read_status(tmp_path) == status


def test_an_island_that_fails_has_not_left_in_good_order(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        diloco.connect(run_of(tmp_path), made(), "SGD", optimizer_options={"lr": 0.1}, alone=True),
    ):
        print(1 / 0)
    last = read_status(tmp_path / "run")
    assert last is not None and last.failed and not last.ended
    found = status_of(find_islands(str(tmp_path / "run")))
    assert found is not None and found.own.state == "ended" and "by an error" in found.own.text


def test_a_view_that_fails_ends_neither_the_training_nor_later_views(tmp_path):
    model = made()
    with diloco.connect(run_of(tmp_path), model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
        headers = run.rounds.driver.applier.headers
        headers.append(object())  # which is none
        assert wait_until(lambda: "no status can be told" in (tmp_path / "run" / "diloco.log").read_text(), 20)
        headers.clear()
        train_all(run, model)
    assert run.finished and (last := read_status(tmp_path / "run")) is not None and last.ended


def test_an_island_tells_of_itself_while_another_does_not_answer(tmp_path):
    config = parse_config(run_of(tmp_path, elastic=PATIENT, inner={"steps": 8, "warmup": 0}))
    network, names = MemoryNetwork(), ("A", "B")
    drivers = {
        name: own_loop_driver(name, names, own_folder(config, name), OwnModel.of(made(), HERE), network)
        for name in names
    }  # fmt: skip
    plain = {name: drivers[name].mailbox.network.plain for name in names}
    peer = SimpleNamespace(plain=plain["A"], name_of=str, connection=Connection(name="A"))
    with (
        introduced(drivers),
        closing(StatusKeeper(tmp_path, drivers["A"], peer, SimpleNamespace(config=config, place=HERE))),
    ):

        def told() -> RunStatus | None:
            return read_status(tmp_path)

        def believed_while_it_waited() -> bool:
            (tmp_path / ASKED).touch()
            stream = plain["B"].accept(CHANNEL, timeout_s=20)
            before = told()
            fresh = wait_until(lambda: (now := told()) is not None and (before is None or now.at > before.at), 10)
            its = IslandStatus("B", "B", "catching up", told_by="B")
            try:
                stream.receive(lambda kind, head, length: memoryview(bytearray(length)), timeout_s=1)
                answer = RunStatus(config.run, "B", 7.0, islands=(its,))  # its clock is half a century late
                stream.send(ANSWER, AGE.pack(0.5), answer.encode(), timeout_s=1)
            except TransportError:  # a busy machine: A had given up
                return False
            return fresh and wait_until(lambda: (now := told()) is not None and now.island("B").told_by == "B", 3)

        assert any(believed_while_it_waited() for _ in range(5))


def test_who_waits_for_whom_is_found_once_however_many_islands_there_are():
    situation = Situation("islands A B C D\nuntil A commits round 4\nslow C 8\nrun 7.5")
    term, asked = situation.world.lives["A"].node.own.term, []
    found = term.offers
    term.offers = lambda fragment: asked.append(fragment) or found(fragment)
    view = situation._view("A")
    assert len(asked) <= 2 and all(each.waiting_for == () for each in view.islands if each.name != "A")
    waiting = {each.name: each.waiting_for for each in merged(view, []).islands}
    assert waiting == {"A": ("C",), "B": ("C",), "C": (), "D": ("C",)}
