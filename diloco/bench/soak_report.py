"""Write the page about a soak: checks, rounds and who was in them, faults, and what was lost."""

from collections.abc import Iterator

from diloco.bench.soak_checks import Observation, Verdict

BUCKET_S = 10.0
BAR = 20  # characters for the bucket with most rounds
MOST_LOST = 20  # that are listed


def render_report(title: str, seen: Observation, verdict: Verdict) -> str:
    """Return the page as Markdown."""
    return "\n".join([f"# {title}", "", *_checks(verdict), *_rounds(seen, verdict), *_events(seen), *_lost(verdict)])


def _checks(verdict: Verdict) -> Iterator[str]:
    yield from ("| check | value | limit | |", "| --- | --- | --- | --- |")
    for check in verdict.checks:
        yield f"| {check.name} | {check.value:.4g} | {check.bound} | {'holds' if check.holds else '**fails**'} |"
    yield ""
    yield (
        f"{verdict.per_s:.2f} rounds a second while faults came and there was a linked quorum; the longest wait "
        f"for one was {verdict.gap_s:.0f} s; {len(verdict.heals)} waits after a change of the world."
    )
    yield ""


def _rounds(seen: Observation, verdict: Verdict) -> Iterator[str]:
    """Show, for every ten seconds, the time with a linked quorum, the rounds, and each island's part in them."""
    counts = list(_buckets(seen, verdict))
    names = sorted({name for commit in verdict.commits for name in commit.contributors}, key=_number)
    most = max([1, *(count for _, _, count, _ in counts)])
    yield from ("## Rounds", "", "Seconds with a linked quorum, rounds, and how many of them each island was in.", "")
    yield f"| from s | quorum s | rounds | | {' | '.join(map(_number_text, names))} |"
    yield "| --- " * (4 + len(names)) + "|"
    for begin_s, quorum_s, count, parts in counts:
        cells = " | ".join(str(parts.count(name) or "") for name in names)
        yield f"| {begin_s:.0f} | {quorum_s:.0f} | {count} | {'#' * round(BAR * count / most)} | {cells} |"
    yield ""


def _buckets(seen: Observation, verdict: Verdict) -> Iterator[tuple[float, float, int, list[str]]]:
    begin_s = 0.0
    while begin_s < seen.end_s:
        end_s = begin_s + BUCKET_S
        inside = [commit for commit in verdict.commits if begin_s <= commit.at_s < end_s and commit.contributors]
        quorum_s = sum(span.overlap(begin_s, end_s) for span in verdict.spans)
        yield begin_s, quorum_s, len(inside), [name for commit in inside for name in commit.contributors]
        begin_s = end_s


def _number(name: str) -> tuple[int, str]:
    text = _number_text(name)
    return (int(text) if text.isdigit() else 0), text


def _number_text(name: str) -> str:
    return name.rpartition("-")[2]


def _events(seen: Observation) -> Iterator[str]:
    for title, lines in (
        ("What was done", seen.faults),
        ("Islands that ended with an error message", seen.refusals),
        ("Islands that crashed or hung", seen.crashes),
    ):
        yield from (f"## {title}", "", *([f"- {at_s:.1f} s: {text}" for at_s, text in lines] or ["none"]), "")


def _lost(verdict: Verdict) -> Iterator[str]:
    yield from ("## Rounds that were lost", "")
    for each in verdict.lost[:MOST_LOST]:
        yield f"- {each.at_s:.1f} s: round {each.round} ({each.digest[:12]}) of {', '.join(each.contributors)}"
    if len(verdict.lost) > MOST_LOST:
        yield f"- and {len(verdict.lost) - MOST_LOST} more"
    yield "none\n" if not verdict.lost else ""
