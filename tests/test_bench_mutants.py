"""The protocol core, broken on purpose: which mutants are generated, and that scenarios and disasters catch them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from diloco.bench import mutants
from diloco.bench.mutants import Trials, core, run_all
from diloco.bench.mutate import Mutant, Mutation, Source, draw
from diloco.errors import DilocoError

SCENARIOS = tuple(sorted((mutants.ROOT / "tests/scenarios").glob("*.txt")))
SMALL = """
class Box:
    def put(self, item: int, *, on: bool = 1 < 2) -> list[int]:
        if item < 3 and not self.full:
            self.remember()
            self.effects.append(msg.Append(item))
            self.note(item)
        self.count = [one for one in self.items if one]
        return self.items or []

    @property
    def full(self) -> bool:
        return len(self.items) >= 9 or self.closed
"""


@pytest.fixture
def small(tmp_path) -> Source:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return Source(path, "small.py")


def test_every_kind_of_change_is_generated_from_the_syntax_tree(small):
    found = [(mutation.kind, mutation.line, mutation.change) for mutation in small.mutations()]
    assert sorted(found) == sorted([
        ("return", 3, "put(…) -> return []"),
        ("negate", 4, "item < 3 and (not self.full) -> not (item < 3 and (not self.full))"),
        ("negate", 4, "item < 3 -> not item < 3"),
        ("compare", 4, "item < 3 -> item <= 3"),
        ("negate", 4, "not self.full -> self.full"),
        ("durable write", 5, "self.remember() -> pass"),
        ("durable write", 6, "self.effects.append(msg.Append(item)) -> pass"),
        ("call", 7, "self.note(item) -> pass"),
        ("negate", 8, "one -> not one"),
        ("negate", 13, "len(self.items) >= 9 or self.closed -> not (len(self.items) >= 9 or self.closed)"),
        ("negate", 13, "len(self.items) >= 9 -> not len(self.items) >= 9"),
        ("compare", 13, "len(self.items) >= 9 -> len(self.items) > 9"),
    ])  # fmt: skip


def test_a_seed_draws_the_same_mutants_again(small):
    drawn = [mutant.change for mutant in draw(small.mutations(), 5, seed=1)]
    assert drawn == [mutant.change for mutant in draw(small.mutations(), 5, seed=1)]
    assert drawn != [mutant.change for mutant in draw(small.mutations(), 5, seed=2)]
    assert len(draw(small.mutations(), 100, seed=1)) == 12


def test_what_is_the_same_bytecode_is_not_drawn(tmp_path):
    path = tmp_path / "dead.py"
    path.write_text("def f(x):\n    if False:\n        x.clear()\n    while not x:\n        x.append(1)\n")
    source = Source(path, "dead.py")
    assert "x.clear() -> pass" in [mutation.change for mutation in source.mutations()]
    assert "x.clear() -> pass" not in [mutant.change for mutant in draw(source.mutations(), 100, seed=1)]


@cache
def early_returns() -> dict[str, Mutation]:
    possible = (mutation for source in core() for mutation in source.mutations())
    return {mutation.function: mutation for mutation in possible if mutation.kind == "return"}


def broken(function: str) -> Mutant:
    mutation = early_returns()[function]
    mutant = mutation.source.mutant(mutation)
    assert mutant is not None
    return mutant


def test_a_broken_core_is_caught_and_an_unchanged_one_is_not():
    dead, deaf, silent = (broken(f"Node.{name}") for name in ("tick", "receive", "offer"))
    unchanged = replace(dead, code=mutants._functions_by_code()[mutants._key(dead.code)][0].__code__)
    trials = Trials(SCENARIOS[:2], range(1))
    verdicts = run_all([dead, unchanged, deaf, silent], trials, 60.0, jobs=2)
    assert [bool(verdict.catch) for verdict in verdicts] == [True, False, True, True]
    assert verdicts[0].trial == SCENARIOS[0].name


def test_one_that_hangs_is_caught_and_so_is_one_whose_process_ends():
    bodies = {"it hangs": "while True: pass", "its process ended with 3": "import os; os._exit(3)"}
    drawn = [with_body(broken("Node.tick"), body) for body in bodies.values()]
    assert [verdict.catch for verdict in run_all(drawn, Trials((), range(1)), 0.2, jobs=1)] == list(bodies)


def with_body(mutant: Mutant, body: str) -> Mutant:
    old = mutant.code
    new = compile(f"def tick(self, now):\n    {body}", old.co_filename, "exec").co_consts[0]
    return replace(mutant, code=new.replace(co_qualname=old.co_qualname, co_firstlineno=old.co_firstlineno))


def test_an_installed_package_has_no_scenarios(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(DilocoError, match="needs a checkout"):
        mutants.measure(seed=1, count=1, seeds=1, jobs=1)
