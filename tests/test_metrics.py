"""What Prometheus, Grafana and TensorBoard read of an island."""

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SMALL
from prometheus_client.parser import text_string_to_metric_families
from trained_run import train

from diloco.config.file import load_config, parse_config
from diloco.errors import ConfigError
from diloco.launch.fleet import Plan
from diloco.report.events import IslandNews, Round, Saved, Step, Wait
from diloco.report.metrics import CONTENT_TYPE, METRICS, READERS, Metrics, Totals, render
from diloco.report.status import STATES, STATUS, IslandStatus, RunStatus

ROOT = Path(__file__).parent.parent
ONE = IslandStatus("id-1", "one", "training", member=True, step=17, loss=2.5, tokens_per_s=1600.0, bytes_sent=7)
TWO = replace(ONE, island="id-2", name='two "\\\n', state="lost", loss=float("nan"))
RUN = RunStatus("r", "id-1", 1000.0, 7, 70, 100, islands=(ONE, TWO))


def totals() -> Totals:
    found = Totals()
    for event in (
        Step(step=9, loss=2.5, tokens_per_s=5.0, lr=1e-3, skipped=2, gradient_norm=0.5),
        Wait(seconds=1.5), Wait(seconds=2.0),
        Round(round=7, contributors=("one",), step=70, digest="d", pseudo_gradient_norm=0.25),
        Round(round=8, contributors=(), step=70, digest="e"),
        Saved(step=9, path="p", seconds=1.0), IslandNews(what="lost", island="two"),
    ):  # fmt: skip
        found.add(event)
    return found


def samples_of(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        sample.name: [(each.labels, each.value) for each in family.samples]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_own_parser_reads_every_metric():
    text = render(RUN, totals())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families[metric.full_name.removesuffix("_total") if metric.kind == "counter" else metric.full_name]
        assert family.type == metric.kind and family.documentation == metric.about
        for sample in family.samples:
            assert set(sample.labels) == {"run", "island", *metric.labels}
    found = samples_of(text)
    assert found["diloco_round"] == [({"run": "r", "island": "one"}, 7.0)]
    assert found["diloco_waited_seconds_total"][0][1] == 3.5 and found["diloco_rounds_total"][0][1] == 1.0
    assert found["diloco_news_total"] == [({"run": "r", "island": "one", "what": "lost"}, 1.0)]
    assert "diloco_validation_loss" not in found  # nobody has said it
    assert found["diloco_gradient_norm"][0][1] == 0.5 and found["diloco_pseudo_gradient_norm"][0][1] == 0.25


def test_a_name_of_ill_will_is_a_label_like_any_other():
    found = samples_of(render(RUN, Totals()))
    states = {(labels["peer"], labels["state"]): value for labels, value in found["diloco_island_state"]}
    assert len(states) == 2 * len(STATES)
    assert states[TWO.name, "lost"] == 1.0 and states[TWO.name, "training"] == 0.0
    twins = replace(RUN, islands=(ONE, TWO, replace(TWO, island="id-3")))
    assert len(samples_of(render(twins, Totals()))["diloco_island_round"]) == 2  # one sample for each set of labels


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def test_an_island_answers_while_it_trains_and_not_afterwards(small, tmp_path):
    config = small(log={"metrics": free_port()})
    folder = Path(config.dir)
    folder.mkdir()
    address = f"http://127.0.0.1:{config.log.metrics}"
    with closing(Metrics(config)) as metrics:
        metrics.emit(Step(step=3, loss=2.0, tokens_per_s=10.0, lr=0.5))
        with urllib.request.urlopen(f"{address}/metrics") as answer:  # before it has said anything
            assert answer.headers["Content-Type"] == CONTENT_TYPE and not samples_of(answer.read().decode())
        (folder / STATUS).write_bytes(RUN.encode())
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            found = samples_of(answer.read().decode())
        assert found["diloco_learning_rate"][0][1] == 0.5 and found["diloco_step"][0][1] == 17.0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/status.json")
        with pytest.raises(ConfigError, match="nobody can listen there"):
            Metrics(config)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/metrics")


def readers() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_readers_that_trickle_take_a_few_threads_and_not_for_ever(small, monkeypatch):
    monkeypatch.setattr("diloco.report.metrics.REQUEST_S", 1.0)
    config = small(log={"metrics": free_port()})
    Path(config.dir).mkdir()
    with closing(Metrics(config)) as metrics, ExitStack() as opened:
        address = ("127.0.0.1", metrics.port)
        slow = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(40)]
        most, ended = 0, set[socket.socket]()
        for _ in range(100):
            for each in slow:
                try:
                    each.sendall(b"G")
                except OSError:
                    ended.add(each)
            most = max(most, readers())
            if len(ended) == len(slow) and not readers():
                break
            time.sleep(0.1)
        assert len(ended) == len(slow) and 0 < most <= READERS and readers() == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            assert answer.status == 200


def test_who_asks_by_a_name_that_is_not_this_machine_s_is_refused(small):
    config = small(log={"metrics": free_port()})
    Path(config.dir).mkdir()
    with closing(Metrics(config)) as metrics:
        for host, status in (("localhost:1", 200), ("10.1.2.3", 200), (socket.gethostname(), 200), ("evil.org", 421)):
            asked = urllib.request.Request(f"http://127.0.0.1:{metrics.port}/metrics", headers={"Host": host})
            if status == 200:
                assert urllib.request.urlopen(asked).status == 200, host
            else:
                with pytest.raises(urllib.error.HTTPError, match="421"):
                    urllib.request.urlopen(asked)


@pytest.mark.parametrize("given", ["nowhere", "70000", "0", "0.0.0.0:", "true", "[9464]"])
def test_what_is_no_port_is_refused(given):
    with pytest.raises(ConfigError, match="write a port such as 9464"):
        load_config(None, [f"log.metrics={given}"])


def test_each_island_of_a_machine_has_a_port_of_its_own(tmp_path):
    plan = Plan(parse_config({**SMALL, "log": {"metrics": 9464}}), tmp_path / "run.yaml", (), islands=3)
    assert 'log.metrics="127.0.0.1:9464"' in plan.founder()
    assert [word for word in plan.joiner("island-3") if "log.metrics" in word] == ['log.metrics="127.0.0.1:9466"']


def test_the_dashboard_for_grafana_asks_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"diloco_\w+", query)}
    assert len(asked) > 10 and asked <= {metric.full_name for metric in METRICS}
    labels = {name for query in queries for name in re.findall(r"by \(([\w, ]+)\)", query) for name in name.split(", ")}
    assert labels <= {label for metric in METRICS for label in metric.labels}


@pytest.mark.slow
def test_tensorboards_reader_finds_the_curves_of_a_run(small, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    train(small(log={"tensorboard": True, "every": 1}))
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    (name,) = found.Runs()
    assert name == "run/tensorboard"
    assert {"step/loss", "step/tokens_per_s", "round/round_s", "validation/validation_loss"} <= set(
        found.Runs()[name]["scalars"]
    )
    assert [each.step for each in found.Scalars(name, "step/loss")][:3] == [1, 2, 3]
