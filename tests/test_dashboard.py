"""`diloco dashboard`: what it serves, to whom, and what people see of it in a real browser."""

import asyncio
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from invited import ticket_in
from launched import TOGETHER, wait_until

from diloco.bench.browser import BROWSER, LAPTOP, PHONE, WHY_SKIPPED, Tab, open_browser
from diloco.bench.made_run import MadeRun
from diloco.checkpoint.log.history import HISTORY, ContributionHeader, Move, RoundHeader
from diloco.comm.peers.admission import Right
from diloco.dashboard import afar
from diloco.dashboard.beside import Beside
from diloco.dashboard.feed import Book, Feed
from diloco.dashboard.local import LocalRun
from diloco.dashboard.server import Door, open_door, stream
from diloco.dashboard.still import write_report
from diloco.errors import DeviceError, JoinRefused, SaveError
from diloco.history.follow import RoundsFollower
from diloco.report.shape import COLUMNS, MOST, MOST_ROUNDS, View, thinned
from diloco.report.status import read_status
from diloco.run.folder import OUTER

EVIL = "<img src=x onerror=alert(1)>"


def header(number: int, parent: str = "", *islands: str, **more) -> RoundHeader:
    parts = tuple(ContributionHeader(each, 10, 5, 10, 3.0 / number) for each in islands)
    tokens = 10 * len(islands)
    chain, sums = (f"{number:064x}", parent or f"{number - 1:064x}"), (tokens, 10 * number)
    return replace(RoundHeader(*chain, number, 1000 * number, 5 * number, 0, *sums, 7, parts, 2), **more)


def append(folder: Path, *lines) -> None:
    (folder / OUTER).mkdir(parents=True, exist_ok=True)
    with (folder / OUTER / HISTORY).open("ab") as file:
        file.writelines(line.line() for line in lines)


# what is kept, and what a viewer lacks


def test_a_viewer_gets_what_it_lacks_and_all_of_it_after_a_reset():
    book = Book()
    book.update({"rounds": [[1], [2]]}, ["a"], {"round": 2})
    place, view = book.since("")
    assert view.reset and view.rounds == [[1], [2]]
    book.update({"rounds": [[3]], "waits": [[0, 1.0, 2.0]]}, ["a"], {"round": 3})
    further, view = book.since(place)
    assert (view.reset, view.rounds, view.waits, view.now) == (False, [[3]], [[0, 1.0, 2.0]], {"round": 3})
    assert book.since(further)[1].rounds == []
    book.update({"rounds": [[9]]}, ["a"], {}, reset=True)
    assert book.since(further)[1].reset and book.since(further)[1].rounds == [[9]]


@pytest.mark.parametrize(
    "place", ["x", "....", "0.1.1.1.1.1", "9" * 500, "{}.999.0.0.0.0", "{}.-1.0.0.0.0", "{}.1", "{}.².0.0.0.0"]
)
def test_a_place_that_is_not_known_means_all_of_it(place):
    book = Book()
    book.update({"rounds": [[1]]}, [], {})
    epoch = book.since("")[0].partition(".")[0]
    assert book.since(place.replace("{}", epoch))[1].reset


def test_old_rows_are_dropped_and_who_lacks_them_begins_anew():
    book = Book()
    book.update({"marks": [[0]]}, [], {})
    place, _ = book.since("")
    book.update({"marks": [[number] for number in range(MOST["marks"])]}, [], {})
    assert not book.since(place)[1].reset
    book.update({"marks": [[1]]}, [], {})
    assert book.since(place)[1].reset and len(book.since("")[1].marks) == MOST["marks"]


def test_of_very_many_rounds_old_ones_are_left_out_and_new_ones_never():
    rounds = [[number] for number in range(50_000)]
    shown = thinned(rounds)
    assert len(shown) <= MOST_ROUNDS and shown[0] == [0] and shown[-1000:] == rounds[-1000:]
    assert thinned(rounds[:300]) == rounds[:300]


def test_rounds_are_followed_as_they_come_and_read_again_after_a_move(tmp_path):
    follower = RoundsFollower(tmp_path)
    assert follower.refresh() == (False, [])
    one, two, three = header(1), header(2), header(3)
    append(tmp_path, one, two)
    assert follower.refresh() == (True, [one, two])
    append(tmp_path, three)
    assert follower.refresh() == (False, [three])
    other = header(3, two.digest, "b", digest="f" * 64)
    append(tmp_path, Move(two.digest, 2), other)
    assert follower.refresh() == (True, [one, two, other])
    (tmp_path / OUTER / HISTORY).unlink()
    append(tmp_path, one)
    assert follower.refresh() == (True, [one])


def test_half_a_line_is_read_when_it_is_whole(tmp_path):
    append(tmp_path, header(1))
    follower = RoundsFollower(tmp_path)
    follower.refresh()
    line = header(2).line()
    path = tmp_path / OUTER / HISTORY
    path.write_bytes(path.read_bytes() + line[:40])
    assert follower.refresh() == (False, [])
    with path.open("ab") as file:
        file.write(line[40:])
    assert follower.refresh() == (False, [header(2)])


# the server


def get(url: str, path: str = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    at = urlsplit(url)
    with closing(http.client.HTTPConnection(at.hostname, at.port, timeout=60)) as connection:
        connection.request(method, at.path + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_only_this_machine_is_let_in_by_its_addresses_and_names():
    with open_door("127.0.0.1", None).listener as listener:
        door = Door(listener, "box.example", "")
        for host in ("127.0.0.1:7117", "localhost", "LOCALHOST:1", "[::1]:7117", "10.1.2.3", "box.example:80"):
            assert door.admits(host), host
        for host in ("", "evil.example", "evil.example:7117", "127.0.0.1.evil.example", "localhost.evil.example"):
            assert not door.admits(host), host


def test_beyond_loopback_the_address_has_a_token_and_only_with_it_anything_is_served(tmp_path):
    with MadeRun(tmp_path / "run", 2, 3) as run, closing(Beside(run.folder, "0.0.0.0", None)) as beside:
        token = urlsplit(beside.url).path.strip("/")
        local = f"http://127.0.0.1:{urlsplit(beside.url).port}/"
        assert len(token) >= 24
        for path in ("", "events", "assets/run.js", "x" * len(token) + "/", token[:-1] + "/"):
            assert get(local, path)[0] == 403
        assert get(local, f"{token}/")[0] == 200 == get(local, f"{token}/assets/plotly.js")[0]
        assert token not in Path(f"/proc/{beside.pid}/cmdline").read_text()


def test_it_is_for_reading_only_says_so_to_browsers_and_refuses_other_hosts(tmp_path):
    with MadeRun(tmp_path / "run", 2, 3) as run, closing(Beside(run.folder, "127.0.0.1", None)) as beside:
        status, headers, body = get(beside.url)
        assert status == 200 and b"<script" in body and b"<script>" not in body
        assert "default-src 'none'" in headers["content-security-policy"] and "server" not in headers
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert get(beside.url, method=method)[0] == 405
        assert get(beside.url, Host="evil.example")[0] == 421
        assert get(beside.url, "assets/../page.css")[0] == 404 == get(beside.url, "assets/..%2fpage.py")[0]


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeviceError, match=f"cannot listen at 127.0.0.1:{port} .*choose another --port"):
            open_door("127.0.0.1", port)
    with pytest.raises(DeviceError, match=r"--host nowhere\.invalid"):
        open_door("nowhere.invalid", None)


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "plotly"])
def test_a_package_that_is_missing_is_told_in_one_line(tmp_path, package):
    code = f"import sys; sys.modules[{package!r}] = None\nsys.argv[1:] = ['dashboard', 'x']\n"
    code += "from diloco.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "pip install 'diloco[dashboard]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


class Viewer:
    """Read a stream of server-sent events, as a browser does."""

    def __init__(self, url: str, place: str = "") -> None:
        at = urlsplit(url)
        self._connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
        self._connection.request("GET", f"{at.path}events", headers={"Last-Event-ID": place} if place else {})
        self._answer = self._connection.getresponse()
        self.place = ""

    def next(self) -> dict:
        """The next view."""
        while True:
            fields = {}
            while line := self._answer.readline().decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if fields.get("event") == "view":
                self.place = fields["id"]
                return json.loads(fields["data"])

    def close(self) -> None:
        self._connection.close()


def test_two_viewers_see_the_same_and_one_that_comes_back_gets_only_what_it_lacks(tmp_path):
    with MadeRun(tmp_path / "run", 3, 40) as run, closing(Beside(run.folder, "127.0.0.1", None)) as beside:
        with closing(Viewer(beside.url)) as one, closing(Viewer(beside.url)) as two:
            first, same = one.next(), two.next()
            assert first["reset"] and first["columns"] == list(COLUMNS) and len(first["rounds"]) >= 40
            assert [row[0] for row in same["rounds"]][:40] == list(range(1, 41))
            assert not one.next()["reset"]
            place = one.place
        seen = len(first["rounds"])
        with closing(Viewer(beside.url, place)) as back:
            again = back.next()
            assert not again["reset"] and len(again["rounds"]) < seen
        with closing(Viewer(beside.url, "elsewhere.1.2.3.4.5")) as stranger:
            assert stranger.next()["reset"]


def test_a_run_that_has_not_begun_is_waited_for_and_what_is_no_run_is_refused(tmp_path):
    book = Book()
    with pytest.raises(SaveError, match="later has not begun yet"):
        LocalRun(tmp_path / "later").look(book)
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "dashboard", "nothing"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 2 and "nothing: no such run" in done.stderr


def test_beside_a_run_that_prints_json_its_address_goes_to_standard_error(tmp_path):
    program = "import pathlib; from diloco.cli.dashboard import show_beside; show_beside(pathlib.Path('x'), 'json')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "" and done.stderr.startswith("dashboard: http://"), done.stderr


def test_a_ticket_that_is_not_to_watch_is_refused_in_one_line(tmp_path):
    words = [sys.executable, "-m", "diloco", "dashboard", ticket_in(tmp_path).render()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 2 and "ask the run's owner for one to watch" in said and "Traceback" not in said


def test_whatever_fails_afar_is_told_and_tried_again_after_a_pause(tmp_path, monkeypatch, caplog):
    """No folder for its key, as an example of what nobody thought of."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(afar, "ASK_S", 0.2)
    with closing(afar.WatchedRun(ticket_in(tmp_path, right=Right.WATCH))) as run:
        assert wait_until(lambda: len(caplog.records) > 1, 20)
        with pytest.raises(JoinRefused, match="failed to ask"):
            run.look(Book())
        assert len(caplog.records) < 100


class Slow:
    """A run that is looked at and never changes."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self, book: Book) -> None:
        self.looks += 1
        book.update({}, [], {"islands": [], "why": [], "at": self.looks})

    def close(self) -> None:
        pass


def test_nothing_is_looked_at_while_nobody_watches():
    source = Slow()
    feed = Feed(source)
    feed.start()
    leave = feed.listen(lambda: None)
    assert wait_until(lambda: source.looks >= 2)
    leave()
    seen = source.looks
    feed.close()
    assert source.looks <= seen + 1


class Lost(Slow):
    """A run that can be seen once, and then not until it is found."""

    found = False

    def look(self, book: Book) -> None:
        if self.looks and not self.found:
            raise SaveError("the run is gone")
        super().look(book)


def test_a_run_that_cannot_be_seen_any_more_is_not_live_until_it_can(monkeypatch):
    monkeypatch.setattr("diloco.dashboard.server.AGAIN_S", 0.0)
    monkeypatch.setattr("diloco.dashboard.feed.LOOK_S", 0.05)

    async def watch() -> list[str]:
        source, told = Lost(), list[str]()
        feed = Feed(source)
        feed.start()
        events = stream(feed, "")
        async for text in events:
            told += re.findall("event: (.*)", text)
            if told.count("problem") == 3:
                source.found = True
            if len(told) > 30 or (told.count("problem") >= 3 and told[-1] == "view"):
                break
        await events.aclose()
        feed.close()
        return told

    told = asyncio.run(watch())
    assert told[told.index("problem") :].count("view") == 1


def test_a_viewer_that_reads_nothing_keeps_nobody_waiting_and_nothing_for_itself():
    async def watch() -> int:
        feed = Feed(Slow())
        feed.start()
        asleep, awake = stream(feed, ""), stream(feed, "")
        await anext(asleep)
        told = 0
        async for text in awake:
            told += "event: view" in text
            if told == 3:
                break
        await asleep.aclose()
        await awake.aclose()
        feed.close()
        return told

    assert asyncio.run(watch()) == 3


def test_the_report_of_a_run_is_one_file_with_its_rounds_in_it(tmp_path):
    with MadeRun(tmp_path / "run", 3, 30, names={"island-2": f"</script>{EVIL}"}) as run:
        path = write_report(run.folder, tmp_path / "report.html")
    text = path.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert len(json.loads(data)["run"]["rounds"]) >= 30 and EVIL not in text
    with pytest.raises(SaveError, match="cannot be written"):
        write_report(run.folder, tmp_path / "no" / "folder.html")


# in a browser

needs_browser = pytest.mark.skipif(BROWSER is None, reason=WHY_SKIPPED)


@contextmanager
def shown(run: MadeRun, device=LAPTOP, *, dark: bool = False):
    with closing(Beside(run.folder, "127.0.0.1", None)) as beside, open_browser() as browser:
        tab = Tab(browser)
        tab.look_like(device, dark=dark)
        tab.open(beside.url)
        tab.wait("document.querySelector('.plot .main-svg') !== null")
        yield tab, beside
        host = f"127.0.0.1:{urlsplit(beside.url).port}"
        assert {urlsplit(each).netloc for each in tab.requests if not each.startswith("data:")} == {host}


ROWS = "[...document.querySelectorAll('#islands tbody tr')]"
STATE = f"Object.fromEntries({ROWS}.map((row) => [row.querySelector('.name span').innerText, row.dataset.state]))"


@needs_browser
def test_curves_move_as_rounds_commit_a_killed_island_is_lost_a_new_one_appears_and_names_are_text(tmp_path):
    names = {"island-3": EVIL, "island-2": '<a href="https://evil.example">two</a>'}
    with MadeRun(tmp_path / "run", 4, 30, later=1, names=names) as run, shown(run) as (tab, _):
        points = "document.querySelector('#losses .plot').data[0].x.length"
        before = tab.run(points)
        tab.wait(f"{points} > {before}")
        assert tab.run(f"Math.max(...{points.replace('.x.length', '.x')})") > 0
        run.kill("island-3")
        tab.wait(f"{STATE}[{json.dumps(EVIL)}] === 'lost'")
        tab.wait(f"document.querySelector('#why').innerText.includes({json.dumps(EVIL)} + ' is lost')")
        run.start("island-5")
        tab.wait(f"({STATE})['island-5'] !== undefined")
        text = tab.text()
        assert EVIL in text and names["island-2"] in text
        assert tab.run("document.querySelectorAll('main img, main a').length") == 0
        assert tab.complaints == []


def view_of(rounds: list[int], waits: list[float]) -> dict:
    """What a page is told of an island that waits in the last tenth of each second, and contributes to rounds."""
    usual = {"collect_s": 1.0, "exchange_s": 0.0, "who": "c", "joined": [], "left": []}
    told = [{**dict.fromkeys(COLUMNS, 0), **usual, "round": each, "time": 1e6 + each} for each in rounds]
    rows = [[each[name] for name in COLUMNS] for each in told]
    late = [[0, 1e6 + each - 0.1, 1e6 + each] for each in waits]
    return View(False, ["one"], rows, late, [[each, 0, "lost", ""] for each in waits], [], [], {}).plain()


@needs_browser
def test_a_page_that_stays_open_forgets_what_a_new_one_would_not_be_told(tmp_path):
    with MadeRun(tmp_path / "run", 3, 30) as run, shown(run) as (tab, _):
        views = [
            view_of(list(range(1, 9001)), list(range(1, 9001))), view_of([9001], list(range(1, 20_001))),
            view_of([], [9000.5]),
        ]  # fmt: skip
        seen = tab.run(
            f"""(() => {{
                const page = new RunPage(document), seen = [];
                for (const view of {json.dumps(views)}) {{
                    page.apply(view);
                    const drawn = page.past[0].spans.some((span) => span[1] === {1e6 + 9000.5});
                    seen.push([page.rounds.length, page.waits.length, page.marks.length, drawn]);
                }}
                return [...seen, page.rounds[page.rounds.length - 1][0], page.waits[page.waits.length - 1][2]];
            }})()"""
        )
        full = [5001, 20_000, 2000]
        assert seen == [[5000, 9000, 2000, False], [*full, False], [*full, True], 9001, 1e6 + 9000.5]
        assert tab.complaints == []


@needs_browser
def test_it_is_good_on_a_phone_and_a_laptop_by_day_and_by_night(tmp_path):
    backs = set()
    with MadeRun(tmp_path / "run", 6, 60) as run, shown(run) as (tab, _):
        for device in (LAPTOP, PHONE):
            for dark in (False, True):
                tab.look_like(device, dark=dark)
                tab.run("new Promise((done) => setTimeout(done, 300))")
                assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
                backs.add((dark, tab.run("getComputedStyle(document.body).backgroundColor")))
                boxes = tab.run(
                    "[...document.querySelectorAll('.plot, canvas')].map((each) => each.getBoundingClientRect().width)"
                )
                assert all(200 < width <= device[0] for width in boxes)
        assert len(backs) == 2 and tab.complaints == []


@needs_browser
def test_a_page_whose_server_is_killed_says_so_and_goes_on_with_the_next_one(tmp_path):
    with MadeRun(tmp_path / "run", 3, 30) as run, shown(run) as (tab, beside):
        port = urlsplit(beside.url).port
        beside.close()
        tab.wait("document.querySelector('.link-state').innerText.includes('connection lost')")
        with closing(Beside(run.folder, "127.0.0.1", port)):
            tab.wait("document.querySelector('.link-state').innerText === 'live'")


class Refusal(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


@needs_browser
def test_a_page_that_is_refused_says_so_and_tries_again(tmp_path):
    with MadeRun(tmp_path / "run", 3, 30) as run, shown(run) as (tab, beside):
        port = urlsplit(beside.url).port
        beside.close()
        http.server.HTTPServer.allow_reuse_address = True
        with http.server.HTTPServer(("127.0.0.1", port), Refusal) as full:
            threading.Thread(target=full.serve_forever, daemon=True).start()
            tab.wait("document.querySelector('.link-state').innerText.includes('connection refused')")
            full.shutdown()
        with closing(Beside(run.folder, "127.0.0.1", port)):
            tab.wait("document.querySelector('.link-state').innerText === 'live'")


@needs_browser
def test_a_report_is_shown_without_a_server(tmp_path):
    with MadeRun(tmp_path / "run", 3, 30) as run:
        path = write_report(run.folder, tmp_path / "report.html")
    with open_browser() as browser:
        tab = Tab(browser)
        tab.open(path.as_uri())
        assert tab.run("document.querySelectorAll('.plot .main-svg').length") >= 2 and tab.complaints == []
        assert {urlsplit(each).scheme for each in tab.requests} <= {"file", "data"}


@contextmanager
def started(folder: Path, *words: str):
    """A `diloco` command that is ended with the block."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco", *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_browser
@pytest.mark.soak
def test_real_islands_are_shown_as_they_train_die_join_and_stop(tmp_path):
    config = {**TOGETHER, "run": "real", "data": {"source": "stdlib", "sequence": 32}, "island": {"batch": 2}}
    config |= {"inner": {**TOGETHER["inner"], "steps": 100_000}, "evaluate": {"samples": 8}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**config, "elastic": {"silence_s": 3}}))
    options = ("--islands", "2", "--no-restart", "--dashboard")
    with started(tmp_path, "run", "c.yaml", *options) as run, open_browser() as browser:
        url = re.search(r"http://\S+", run.stdout.readline())[0]
        threading.Thread(target=run.stdout.read, daemon=True).start()
        tab = Tab(browser)
        tab.open(url)
        rounds = "Number(document.querySelector('[data-tile=round]').innerText)"
        tab.wait(f"{rounds} >= 3", 300)
        os.kill(read_status(tmp_path / "runs" / "real" / "island-2").pid, signal.SIGKILL)
        tab.wait(f"['lost', 'ended'].includes(({STATE})['island-2'])")
        seen = tab.run(rounds)
        tab.wait(f"{rounds} > {seen}", 300)
        ticket = str(tmp_path / "runs" / "real" / "ticket")
        with started(tmp_path, "join", ticket, "--name", "guest"):
            tab.wait(f"['training', 'waiting', 'sending'].includes(({STATE})['guest'])", 300)
        run.send_signal(signal.SIGINT)
        tab.wait("document.querySelector('.link-state').innerText.includes('connection lost')", 300)
        assert [each for each in tab.complaints if "net::ERR" not in each] == []  # that the server is gone
