"""How much an Arrow stream says that it inflates to, read before anything is inflated.

Arrow allocates what a compressed buffer declares, eight bytes that a sender may choose. So the
framing is walked first: message headers are flatbuffers, of which only the places of the
buffers are needed here.

Source: Arrow columnar format, "Encapsulated message format" and `Message.fbs` (format 5).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

MAX_MESSAGES = 10_000
MAX_BUFFERS = 10_000
MAX_RATIO = 1_000
"""Inflated over sent bytes. Rows of a training differ more: they inflate some ten times."""

FREE_BYTES = 16 << 20
"""Up to here no ratio is asked about: a few equal rows inflate a lot, and cost nothing."""

CONTINUATION = 0xFFFFFFFF
DICTIONARY_BATCH = 2
RECORD_BATCH = 3
PLAIN = -1
"""Declared length of a buffer that was left as it is because it does not shrink."""

# Places of the fields in the tables of Message.fbs.
MESSAGE_HEADER_TYPE, MESSAGE_HEADER, MESSAGE_BODY_LENGTH = 1, 2, 3
DICTIONARY_DATA = 1
BATCH_BUFFERS, BATCH_COMPRESSION = 2, 3


def check_inflated_size(body: pa.Buffer, *, max_bytes: int, max_wire_bytes: int) -> int:
    """Return how many bytes the buffers of a stream take once inflated, as it declares them.

    Args:
        body: A whole stream.
        max_bytes: The most that it may declare.
        max_wire_bytes: The most that it may be as it came.

    Raises:
        WireError: 413 where it declares more, 422 where its framing is none.
    """
    if body.size > max_wire_bytes:
        raise WireError(
            413, f"the body has {body.size} bytes, at most {max_wire_bytes} are taken: send fewer"
        )
    total = 0
    try:
        for size in _declared(memoryview(body)):
            total += size
            if total > max_bytes:
                raise WireError(
                    413, f"the body inflates to more than {max_bytes} bytes: send fewer cuts"
                )
    except (struct.error, IndexError) as error:
        raise WireError(422, "the body is no Arrow stream: a place lies outside it") from error
    if total > FREE_BYTES and total > MAX_RATIO * body.size:
        raise WireError(413, f"the body inflates more than {MAX_RATIO} times: that is no data")
    return total


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table: where it and its vtable begin."""

    data: memoryview
    at: int
    vtable: int

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls._placed(data, _u32(data, 0))

    @classmethod
    def _placed(cls, data: memoryview, at: int) -> _Table:
        (back,) = struct.unpack_from("<i", data, at)
        return cls(data, at, _inside(at - back))

    def place(self, field: int) -> int | None:
        """Return where a field's value lies; None where the table leaves it out."""
        slot = 4 + 2 * field
        if slot + 2 > struct.unpack_from("<H", self.data, self.vtable)[0]:
            return None
        (offset,) = struct.unpack_from("<H", self.data, self.vtable + slot)
        return self.at + offset if offset else None

    def table(self, field: int) -> _Table | None:
        """Return the table that a field points to."""
        at = self.place(field)
        return None if at is None else self._placed(self.data, at + _u32(self.data, at))


def _declared(data: memoryview) -> Iterator[int]:
    """Yield the inflated size of each buffer of each message."""
    at = 0
    for _ in range(MAX_MESSAGES):
        if at == len(data):
            return  # the end mark may be left out
        if _u32(data, at) != CONTINUATION:
            raise WireError(422, "the body is no Arrow stream of format 0.15 or later")
        header_bytes = _u32(data, at + 4)
        if not header_bytes:
            return
        at += 8
        if header_bytes > len(data) - at:
            raise WireError(422, "the body ends within a message")
        message = _Table.root(data[at : at + header_bytes])
        at += header_bytes
        body_bytes = _body_bytes(message)
        if body_bytes > len(data) - at:
            raise WireError(422, "the body ends within a message")
        yield from _buffers(message, data[at : at + body_bytes])
        at += body_bytes
    raise WireError(413, f"the body has more than {MAX_MESSAGES} messages: send fewer")


def _body_bytes(message: _Table) -> int:
    at = message.place(MESSAGE_BODY_LENGTH)
    (length,) = (0,) if at is None else struct.unpack_from("<q", message.data, at)
    return _inside(length)


def _buffers(message: _Table, body: memoryview) -> Iterator[int]:
    type_at = message.place(MESSAGE_HEADER_TYPE)
    header_type = 0 if type_at is None else message.data[type_at]
    batch = message.table(MESSAGE_HEADER)
    if batch is not None and header_type == DICTIONARY_BATCH:
        batch = batch.table(DICTIONARY_DATA)
    elif header_type != RECORD_BATCH:
        return
    places = None if batch is None else batch.place(BATCH_BUFFERS)
    if batch is None or places is None:
        return
    is_compressed = batch.place(BATCH_COMPRESSION) is not None
    places += _u32(batch.data, places)
    num_buffers = _u32(batch.data, places)
    if num_buffers > MAX_BUFFERS:
        raise WireError(413, f"a message has more than {MAX_BUFFERS} buffers")
    for index in range(num_buffers):
        offset, length = struct.unpack_from("<qq", batch.data, places + 4 + 16 * index)
        size = _inside(length)
        yield _inflated(body, _inside(offset), size) if is_compressed else size


def _inflated(body: memoryview, offset: int, length: int) -> int:
    if not length:
        return 0
    (declared,) = struct.unpack_from("<q", body, offset)
    return length if declared == PLAIN else _inside(declared)


def _u32(data: memoryview, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found


def _inside(place: int) -> int:
    """Return a place or length; `struct` would count a negative one from the end."""
    if place < 0:
        raise WireError(422, "the body is no Arrow stream: it has a negative length")
    return place
