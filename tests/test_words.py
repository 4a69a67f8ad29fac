"""Words that were retired stay away: one idea has one word, the field's own."""

import io
import tokenize
from pathlib import Path

import pytest
from count_code import PRODUCT, ROOT, files_below

RETIRED = {  # the old word: the one that took its place
    "Acquaintances": "AddressBook", "Alone": "a run of one island", "Apart": "Separation", "Beating": "Heartbeats",
    "Entrance": "RunEntry", "Following": "CurrentAttempt", "Frozen": "SnapshotContents",
    "HAIR": "ROUNDING_MARGIN", "Happened": "FleetHistory", "InForce": "AmendedConfig", "Keeper": "Applier",
    "Kept": "SnapshotMeta", "LATELY": "FRESH_HEARTBEATS", "Membership": "SyncLoop", "Parcel": "ItemManifest",
    "Place": "ProcessMesh, ByteRange or BufferFor", "SELDOM": "RESEND_EVERY", "Said": "WorkerMessage",
    "Seat": "ProtocolState", "Setting": "…Config", "Setup": "DisasterConfig", "Together": "Rounds",
    "Trained": "StepsDone", "Word": "LivenessReport", "Work": "PendingProgress",
    "believe": "accept_report", "doubtful": "diverged", "give_everything": "contribute_all", "loud": "broadcasts",
    "parcel": "manifest", "photograph": "write_snapshot", "photographing": "writing_snapshot",
    "stories": "round_events", "take_place": "open_mesh", "take_what_moved": "apply_remote_updates",
    "vouch": "record_digest",
}  # fmt: skip
RETIRED_IN = {  # where a word means something else in other places
    "diloco/train": {"ask": "request_samples", "look": "refresh", "take": "apply_result", "stories": "round_events"},
    "elastic/runtime/session.py": {"ask": "request_samples", "look": "refresh", "take": "apply_result"},
    "diloco/launch": {"look": "poll"},
}


def names_in(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("room", PRODUCT)
def test_no_retired_word_is_used(room: str) -> None:
    found = set()
    for file in files_below(ROOT / room):
        path, retired = str(file.relative_to(ROOT)), dict(RETIRED)
        for where, words in RETIRED_IN.items():
            retired |= words if path.startswith(where) else {}
        found |= {(path, word, retired[word]) for word in names_in(file) & retired.keys()}
    assert found == set()
