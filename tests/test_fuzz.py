"""A few mutated inputs for every decoder of outside bytes; `tests/fuzz.py` alone gives them millions.

`DILOCO_FUZZ=100000` sets how many inputs each decoder gets; `make prove` does.
"""

import os

import fuzz
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tape import Tape

from diloco.comm.codec.registry import CODECS
from diloco.comm.transport import frame
from diloco.comm.transport.transport import Stream
from diloco.comm.transport.wire import WireCarrier
from diloco.errors import TransportError

INPUTS = int(os.environ.get("DILOCO_FUZZ", "1000"))


@pytest.mark.parametrize("name", fuzz.DECODERS)
def test_mutated_bytes_are_taken_or_refused_by_name(name, monkeypatch):
    for limit in ("MAX_HEAD", "MAX_PAYLOAD"):
        monkeypatch.setattr(frame, limit, getattr(frame, limit))  # the harness sets them low
    found = fuzz.joined([fuzz.feed(name, INPUTS // fuzz.DECODERS[name]().cost, seed=7)])
    assert not found.failure, f"{found.failure}: {found.input}"
    assert found.inputs and not found.skipped


def test_every_codec_is_among_them():
    assert {name.removeprefix("bulk ") for name in fuzz.DECODERS} >= CODECS.keys()


@given(st.binary(max_size=300))
def test_noise_is_no_frame(raw: bytes) -> None:
    with pytest.raises(TransportError):
        Stream(WireCarrier(Tape(raw))).receive()
