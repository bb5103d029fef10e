from __future__ import annotations

import pickle  # noqa: TID251  # written, never loaded
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.importers.plain_pickle import (
    MAX_VALUES,
    PlainPickleError,
    load_plain_pickle,
)
from tests.support.collector.hostile_files import pickles

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 100), 1 << 100)
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(alphabet="abc_"), inner)
    ),
)


@given(PLAIN, st.integers(3, 5))
def test_plain_values_are_read_as_they_were_written(value: Any, protocol: int) -> None:  # noqa: ANN401
    assert load_plain_pickle(pickle.dumps(value, protocol=protocol)) == value


def test_protocol_2_as_pytorch_writes_it_is_read() -> None:
    shared = {"filename": "train.py", "line": 70}
    value = {
        "entries": [{"frames": [shared, shared], "process_group": ("0", "dp"), "seq": 1 << 40}]
    }

    assert load_plain_pickle(pickle.dumps(value, protocol=2)) == value


@pytest.mark.parametrize(
    "value", [{1, 2}, complex(1, 2), bytearray(b"x"), {(1,): 2}, PlainPickleError]
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(PlainPickleError):
        load_plain_pickle(pickle.dumps(value, protocol=4))


def test_hostile_pickles_are_refused_and_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    hostile = pickles(marker)
    hostile["many-lists"] = b"]" * (MAX_VALUES + 1) + b"."
    hostile["large-memo"] = b"\x80\x02N" + b"r" + struct.pack("<I", 2**32 - 1) + b"q\x00"
    hostile["empty"] = b""
    hostile["no-mark"] = b"\x80\x02]e."
    hostile["text-as-list"] = b"\x80\x02X\x01\x00\x00\x00a(K\x01e."
    hostile.pop("pickle-laughs")  # references alone: it is small

    for data in hostile.values():
        with pytest.raises(PlainPickleError):
            load_plain_pickle(data)
    assert not marker.exists()
