"""`diloco why`: situations of simulated islands, each with the sentence that explains it, and what measurements say.

The situations in which both `why` and `status` must say the right thing, and where that is shown: among simulated
islands, by the name that SITUATIONS has below, or among real ones, in another file.

 1 healthy                      "healthy"; test_why_islands.py
 2 one island is slow           "one island slow"; test_why_islands.py: held_up
 3 links are slow               "slow links"; of one that is full: test_why_islands.py: max-up
 4 a disk is slow               "slow disk"
 5 a disk is full               test_why_islands.py: fill
 6 an island is lost            "lost"; killed, seen from its own machine: test_status.py: SIGKILL
 7 an island is stopped         "stopped"; seen from its own machine: test_status.py: SIGSTOP
 8 a minority is cut off        "partitioned minority"
 9 a majority goes on           "the majority"
10 waiting for min_islands      "waiting for min_islands"
11 waiting for the founding     "waiting for the founding"
12 catching up                  "catching up"
13 not in the roster yet        "not in the roster yet"
14 no route to one peer         "no route to one peer"
15 a contribution is refused    "refused contribution"
16 excluded for what it says    "another result than everybody's", "signs of life and no answers", "garbage"
17 taken out, or gone by itself "evicted", "left"
18 a ticket is revoked          test_why_islands.py: revoke
19 a clock is wrong             test_why_islands.py: ahead_s
20 waiting for samples          "without samples"
21 a witness                    "a witness"
22 two islands with one key     test_why_islands.py: twin
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from situations import BEGAN, Situation

from diloco.errors import SaveError
from diloco.report.events import IslandNews
from diloco.report.shown import status_lines
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.why import Facts, why_island, why_now, why_round
from diloco.units import format_duration

THREE = "islands A B C\nuntil A commits round 4\n"
QUORUM = "islands A B C\npartition quorum\nuntil A commits round 3\n"

# what happens, who is asked, about whom ("": the run), and what it must say
SITUATIONS = {
    "healthy": (THREE + "run 1", "A", "", "nothing holds the run up: 3 islands at work, a round takes 3.7 s"),
    "an island of a healthy run": (THREE + "run 1", "A", "B", "B trains, and its work is in the last rounds"),
    "one island slow": (
        THREE + "slow C 8\nrun 13", "A", "", "the last round went on without C, which was not ready in time: 4 of the "
        "last 5 rounds contain its work",
    ),
    "the slow island": (THREE + "slow C 8\nrun 13", "A", "C", "the last round did not wait for C"),
    "slow links": (
        "islands A B C\nexchange 12\nuntil A commits round 4\nrun 6", "A", "",
        "the exchange takes 12 s of a round's 15 s: the links are the bottleneck",
    ),
    "slow disk": (THREE + "disk C 3\nrun 20", "A", "", "C's disk is the bottleneck: a write takes 6.0 s"),
    "lost": (THREE + "crash C\nrun 12", "A", "C", "C is lost, last heard 12 s ago: its connection broke; rounds go on"),
    "stopped": (
        THREE + "stop C\nrun 12", "A", "", "C is lost, last heard 12 s ago: it is silent, for longer than "
        "elastic.silence_s=2; rounds go on without it",
    ),
    "partitioned minority": (
        QUORUM + "cut A | B C\nrun 20", "A", "", "nothing is committed: A alone is no quorum of the 3 members; B and C "
        "cannot be heard from A",
    ),
    "one that the minority waits for": (
        QUORUM + "cut A | B C\nrun 20", "A", "B", "B is lost, last heard 20 s ago: it is silent, for longer than "
        "elastic.silence_s=2; and rounds wait for it",
    ),
    "the majority": (QUORUM + "cut A | B C\nrun 20", "B", "A", "A is lost, last heard 20 s ago"),
    "back, and nobody else is": (
        "islands A B\npartition merge\nuntil A commits round 3\ncrash A\ncrash B\nstart B\nrun 6", "B", "",
        "B has come back and looks for A, with whom it was last in a round",
    ),
    "waiting for min_islands": (
        "islands A B\nmin 3\nrun 20", "A", "", "rounds wait for islands: 2 of the 3 that elastic.min_islands asks for "
        "are there. Start more, or lower it: diloco set RUN elastic.min_islands=2",
    ),
    "waiting for the founding": (
        "islands A B\nfounding by 3 within 30\nrun 5", "A", "",
        "the first round waits for more islands (elastic.start_islands): 2 islands so far",
    ),
    "catching up": (
        THREE + "cut C | A B\nrun 30\nheal\nrun 0.7", "A", "C", "fetches what it has missed",
    ),
    "not in the roster yet": (
        "islands A B C\npartition quorum\nexchange 12\nuntil A commits round 3\nstart D\nrun 10", "A", "D",
        "D is not in the roster yet: the next round that A leads takes it in",
    ),
    "no route to one peer": (
        "islands A B C D\nuntil A commits round 3\ncut C | D\nrun 15", "C", "",
        "C and D cannot reach each other, though A and B can reach both: rounds leave one of the two out, in turn",
    ),
    "refused contribution": (
        "islands A B C D\nuntil A commits round 2\nnorm A 1\nnorm B 1000\nnorm C 1\nnorm D 1\nrun 6", "A", "B",
        "B is excluded for another 37 s: its contribution is more than 100 times as large as the others'",
    ),
    "another result than everybody's": (
        "islands A B C\nuntil A commits round 2\nspoil C\nrun 6", "A", "C", "holds another result than the others",
    ),
    "signs of life and no answers": (
        "islands A B C\nuntil A commits round 2\nmute C\nrun 20", "A", "", "C is excluded for another 3 s: gives signs "
        "of life but no promise",
    ),
    "garbage": ("islands A B C\nuntil A commits round 2\ngarbage C at A\nrun 4", "A", "C", "C is excluded"),
    "evicted": (
        QUORUM + "evict C at A\nrun 5", "A", "C",
        "C is out for good: the run's owner has taken it out (diloco evict)",
    ),
    "left": (THREE + "run 1\nleave C\nrun 4", "A", "C", "C said goodbye 4.0 s ago: it stopped in good order"),
    "without samples": (
        "islands A B\nsamples 40\nuntil A commits round 2\nrun 30", "A", "", "waits for samples to be leased",
    ),
    "a witness": (
        "islands A B\npartition quorum\nuntil A commits round 2\nwitness C\nrun 10", "A", "C",
        "C contributes nothing because it is a witness",
    ),
}  # fmt: skip


def test_each_situation_that_the_list_above_names_is_somewhere():
    lines = [line[31:] for line in __doc__.splitlines() if re.match(r"[ \d]\d ", line)]
    assert len(lines) >= 20 and all(lines)
    assert {name for line in lines for name in re.findall('"([^"]+)"', line)} <= set(SITUATIONS)
    for file, what in (place for line in lines for place in re.findall(r"(test_\w+\.py)(?:: ([\w-]+))?", line)):
        assert what in (Path(__file__).parent / file).read_text(), (file, what)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_has_its_sentence(situation):
    script, teller, about, expected = SITUATIONS[situation]
    facts = Situation(script).facts(teller)
    found = why_island(facts, about) if about else why_now(facts)
    assert any(expected in sentence for sentence in found), found


# of the same situations, what `diloco status` shows of an island
SHOWN = {
    "healthy": ("B", r"training +4 +3 .* 33%"),
    "one island slow": ("C", r"training .* 0%"),
    "slow links": ("B", "sending"),
    "lost": ("C", r"lost +12 s .*its connection broke"),
    "stopped": ("C", r"lost +12 s .*it is silent"),
    "partitioned minority": ("A", "waiting for B, C"),
    "waiting for min_islands": ("A", "waiting for more islands"),
    "waiting for the founding": ("B", "waiting for more islands"),
    "catching up": ("C", "catching up .*not in the roster"),
    "not in the roster yet": ("D", "waiting for A .*not in the roster"),
    "no route to one peer": ("D", r"lost +15 s .*it is silent; heard by A, B"),
    "refused contribution": ("B", "excluded .*for another 37 s"),
    "another result than everybody's": ("C", "excluded .*for another 38 s"),
    "signs of life and no answers": ("C", "excluded .*for another 3 s"),
    "garbage": ("C", "excluded"),
    "evicted": ("C", "evicted .*not in the roster"),
    "left": ("C", r"left +4.0 s"),
    "without samples": ("A", "waiting for samples"),
    "a witness": ("C", "witnessing"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SHOWN)
def test_each_situation_is_seen_in_the_status(situation):
    (script, teller, *_), (island, expected) = SITUATIONS[situation], SHOWN[situation]
    status = Situation(script).facts(teller).status
    assert status is not None
    (line,) = (line for line in status_lines(status, status.at) if line.startswith(f"{island} "))
    assert re.match(rf"{island} +{expected}", line), line


ROUNDS = {
    "as always": (THREE, 4, "round 4 took 3.7 s", "3.0 s until all contributions were there"),
    "it waited for one that was late": (
        THREE + "slow C 8\nrun 13", 6, "round 6 took 5.5 s, usually 3.7 s",
        "it waited 1.7 s longer than usual for contributions", "C contributed to the round before, and not to this one",
    ),
    "the exchange was slow": (
        THREE + "exchange 9\nuntil A commits round 6", 6, "usually",
        "the exchange took 8.3 s longer than usual, by a link or a disk",
    ),
    "one left with it": (THREE + "run 1\nleave C\nrun 4", 5, "C left the roster with it"),
    "one joined with it": (
        "islands A B\nuntil A commits round 3\nstart C\nrun 20", 7, "C joined with it",
    ),
    "work that came late": (
        "islands A B C D\nuntil A commits round 3\ncut C | D\nrun 15", 5,
        "C brought work of an earlier phase: it had missed a round",
    ),
    "one that is not there": (THREE, 99, "round 99 is not known here: the last one is round 4"),
}  # fmt: skip


@pytest.mark.parametrize("situation", ROUNDS)
def test_each_round_has_its_sentence(situation):
    script, number, *expected = ROUNDS[situation]
    found = why_round(Situation(script).facts("A"), number)
    for part in expected:
        assert any(part in sentence for sentence in found), found


def test_a_number_that_was_counted_twice_means_the_last_round_of_it():
    """A run that was resumed with other settings counts anew: `diloco log` shows both, the later one below."""
    rounds = Situation(THREE).facts("A").rounds
    again = [replace(each, exchange_ms=90_000) for each in rounds]
    said = why_round(Facts(rounds=[*rounds, *again]), 3)
    assert any(f"{format_duration(90)} in the exchange" in sentence for sentence in said), said


# what only the processes can measure

NOW = BEGAN + 100


def a_run(**own: object) -> RunStatus:
    """Two islands at work that tell about themselves, the second with these figures."""
    usual = {"state": "training", "member": True, "share": 0.5, "contributed": 5, "tokens_per_s": 1600.0}
    one = IslandStatus("id-1", "one", told_by="one", **usual)  # type: ignore[arg-type]
    two = replace(one, island="id-2", name="two", told_by="two", **own)
    return RunStatus("r", "id-1", NOW, round=9, round_s=10.0, exchange_s=1.0, rounds=5, islands=(one, two))


MEASURED = {
    "slow GPU": (
        {"tokens_per_s": 400.0}, "two is slow: it trains 400 tokens/s where the others have 1.6k, 4.0 times as many; "
        "its GPU or CPU is the bottleneck",
    ),
    "full link": (
        {"link_bytes_per_s": 2.4e6, "link_limit_bytes_per_s": 2.5e6},
        "two's link is the bottleneck: its last exchange ran at 19.2 mbit/s of the 20 mbit/s that it may use",
    ),
    "disk full": (
        {"disk": "/data cannot be written (No space left on device)"},
        "two's disk takes nothing: /data cannot be written (No space left on device). It trains on",
    ),
    "slow disk": ({"write_s": 4.0}, "two's disk is the bottleneck: a write takes 4.0 s"),
    "wrong clock": (
        {"clock_off_s": 3600.0},
        "the clocks of one's and two's machines are 1:00 h apart: set the one that is wrong",
    ),
    "process gone": (
        {"state": "ended", "since": NOW - 30, "text": "its process is gone without a goodbye"},
        "two does not run any more, last heard 30 s ago: its process is gone without a goodbye",
    ),
    "process stopped": (
        {"state": "silent", "since": NOW - 30, "text": "its process is starved"},
        "two is silent, last heard 30 s ago: its process is starved",
    ),
    "waiting for samples": ({"state": "waiting", "cause": "samples"}, "two waits for samples to be leased"),
}  # fmt: skip


def test_a_missing_quorum_comes_back_before_an_owner_has_to_do_without_it():
    text = "its process 7 is stopped by a signal, kill -CONT 7 lets it go on"
    gone = a_run(state="silent", since=NOW - 30, text=text)
    waits = replace(gone.islands[0], state="waiting", cause="quorum", waiting_for=("two",))
    assert why_now(Facts(replace(gone, islands=(waits, gone.islands[1])), now=NOW)) == [
        "nothing is committed: one alone is no quorum of the 2 members; two cannot be heard from one",
        f"two is silent, last heard 30 s ago: {text}",
        "only if two is gone for good, the owner continues without: diloco force-roster RUN --keep one",
    ]
    other = replace(gone.islands[1], island="id-3", name="three", told_by="three", text="it hangs", since=NOW - 9)
    third = replace(waits, island="id-4", name="four", told_by="four", waiting_for=("three",))
    said = why_now(Facts(replace(gone, islands=(waits, gone.islands[1], other, third)), now=NOW))
    assert "three is silent, last heard 9.0 s ago: it hangs" in said  # though another waits for it
    lost = replace(gone.islands[1], state="lost", text="it is silent")
    said = why_now(Facts(replace(gone, islands=(waits, lost)), now=NOW))
    assert len(said) == 2 and said[1].startswith("if two is gone for good, the owner continues without: diloco force")


@pytest.mark.parametrize("what", MEASURED)
def test_what_is_measured_is_said_with_its_figures(what):
    own, expected = MEASURED[what]
    facts = Facts(a_run(**own), now=NOW)
    assert any(expected in sentence for sentence in why_now(facts)), why_now(facts)
    healthy = Facts(a_run(), now=NOW)
    assert why_now(healthy) == ["nothing holds the run up: 2 islands at work, a round takes 10 s"]


def test_one_whose_ticket_was_revoked_is_told_so():
    outside = a_run(member=False, share=0.0, contributed=0)
    news = IslandNews(
        time=NOW - 5, what="kept out", island="two",
        text="another island does not let this one in: its ticket was revoked",
    )  # fmt: skip
    (sentence,) = why_island(Facts(outside, events=[news], now=NOW), "two")
    assert sentence.startswith(
        "two is not in the roster: another island does not let this one in: its ticket was revoked"
    )


def test_one_whose_work_is_refused_and_one_that_is_too_slow_are_told_why_they_contribute_nothing():
    idle = a_run(share=0.0, contributed=2)
    refused = IslandNews(time=NOW - 5, what="refused", island="two", text="one refuses its contribution: NaN")
    assert why_island(Facts(idle, events=[refused], now=NOW), "two") == [
        "two contributes nothing now, 2 of the last 5 rounds contain its work: it was refused: "
        "one refuses its contribution: NaN"
    ]
    slow = IslandNews(time=NOW - 5, what="slow", island="two", text="an exchange with it takes about 90 s")
    assert why_island(Facts(idle, events=[slow], now=NOW), "two") == [
        "two takes part in some rounds only, 2 of the last 5 rounds contain its work: "
        "an exchange with it takes about 90 s"
    ]


def test_a_run_that_does_not_go_on_and_one_that_nobody_knows_are_told_apart():
    gone = a_run()
    gone = replace(gone, islands=tuple(replace(each, state="ended") for each in gone.islands))
    (sentence,) = why_now(Facts(gone, now=NOW))
    assert sentence.startswith("the run does not go on: one, two: their processes are gone at round 9")
    assert "nothing is known" in why_now(Facts(now=NOW))[0]


def test_an_island_that_is_long_gone_is_known_from_the_rounds():
    facts = Situation(THREE + "run 1\nleave C\nrun 30").facts("A")
    assert facts.status is not None
    without = replace(facts.status, islands=tuple(each for each in facts.status.islands if each.name != "C"))
    found = why_island(replace(facts, status=without), "C")
    assert found[0] == "C contributed to 3 rounds, the last one 4" and "it left the roster with round 5" in found[1]
    with pytest.raises(SaveError, match=r"Z: no such island; the run has A, B, C$"):
        why_island(facts, "Z")


def test_the_age_of_what_was_heard_last_counts_from_now():
    left = a_run(state="ended", since=NOW, text="it left in good order")
    assert why_island(Facts(left, now=NOW + 23), "two") == [
        "two does not run any more, last heard 23 s ago: it left in good order"
    ]
