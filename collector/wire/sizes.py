"""Declared size of an Arrow stream after decompression, read without decompressing it.

Arrow allocates the size that a compressed buffer declares in its first eight bytes, which the
client chooses. So the sizes of all buffers are summed up first. Message headers are flatbuffers,
of which only the offsets of the buffers are read (docs/decisions/0016-untrusted-bodies.md).

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
"""Largest ratio of decompressed to sent bytes. Real rows have a ratio of some ten."""

FREE_BYTES = 16 << 20
"""Up to this size the ratio is not checked: a few equal rows compress a lot."""

CONTINUATION = 0xFFFFFFFF
DICTIONARY_BATCH = 2
RECORD_BATCH = 3
PLAIN = -1
"""Declared length of a buffer that is stored uncompressed, because it does not shrink."""

# Field numbers in the tables of Message.fbs.
MESSAGE_HEADER_TYPE, MESSAGE_HEADER, MESSAGE_BODY_LENGTH = 1, 2, 3
DICTIONARY_DATA = 1
BATCH_BUFFERS, BATCH_COMPRESSION = 2, 3


def check_inflated_size(body: pa.Buffer, *, max_bytes: int, max_wire_bytes: int) -> int:
    """Return the declared size of a stream's buffers after decompression.

    Args:
        body: A whole stream.
        max_bytes: Limit of the declared size.
        max_wire_bytes: Limit of the size as it was sent.

    Raises:
        WireError: 413 if a limit is exceeded, 422 if the framing is not valid.
    """
    if body.size > max_wire_bytes:
        raise WireError(
            413, f"the body has {body.size} bytes, the limit is {max_wire_bytes}: send fewer cuts"
        )
    total = 0
    try:
        for size in _declared_sizes(memoryview(body)):
            total += size
            if total > max_bytes:
                raise WireError(
                    413, f"the body inflates to more than {max_bytes} bytes: send fewer cuts"
                )
    except (struct.error, IndexError) as error:
        raise WireError(422, "the body is not an Arrow stream: an offset is outside it") from error
    if total > FREE_BYTES and total > MAX_RATIO * body.size:
        raise WireError(413, f"the body inflates more than {MAX_RATIO} times")
    return total


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table: its offset and that of its vtable."""

    data: memoryview
    at: int
    vtable: int

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls._at(data, _u32(data, 0))

    @classmethod
    def _at(cls, data: memoryview, at: int) -> _Table:
        (back,) = struct.unpack_from("<i", data, at)
        return cls(data, at, _not_negative(at - back))

    def offset(self, field: int) -> int | None:
        """Return the offset of a field's value; None if the table does not have the field."""
        slot = 4 + 2 * field
        if slot + 2 > struct.unpack_from("<H", self.data, self.vtable)[0]:
            return None
        (offset,) = struct.unpack_from("<H", self.data, self.vtable + slot)
        return self.at + offset if offset else None

    def table(self, field: int) -> _Table | None:
        """Return the table that a field refers to; None if the table does not have the field."""
        at = self.offset(field)
        return None if at is None else self._at(self.data, at + _u32(self.data, at))


def _declared_sizes(data: memoryview) -> Iterator[int]:
    """Yield the declared size of each buffer of each message."""
    at = 0
    for _ in range(MAX_MESSAGES):
        if at == len(data):
            return  # the end marker is optional
        if _u32(data, at) != CONTINUATION:
            raise WireError(422, "the body is not an Arrow stream of format 0.15 or later")
        header_bytes = _u32(data, at + 4)
        if not header_bytes:
            return
        at += 8
        if header_bytes > len(data) - at:
            raise WireError(422, "the body ends inside a message")
        message = _Table.root(data[at : at + header_bytes])
        at += header_bytes
        body_bytes = _body_bytes(message)
        if body_bytes > len(data) - at:
            raise WireError(422, "the body ends inside a message")
        yield from _buffers(message, data[at : at + body_bytes])
        at += body_bytes
    raise WireError(413, f"the body has more than {MAX_MESSAGES} messages: send fewer")


def _body_bytes(message: _Table) -> int:
    at = message.offset(MESSAGE_BODY_LENGTH)
    (length,) = (0,) if at is None else struct.unpack_from("<q", message.data, at)
    return _not_negative(length)


def _buffers(message: _Table, body: memoryview) -> Iterator[int]:
    type_at = message.offset(MESSAGE_HEADER_TYPE)
    header_type = 0 if type_at is None else message.data[type_at]
    batch = message.table(MESSAGE_HEADER)
    if batch is not None and header_type == DICTIONARY_BATCH:
        batch = batch.table(DICTIONARY_DATA)
    elif header_type != RECORD_BATCH:
        return
    at = None if batch is None else batch.offset(BATCH_BUFFERS)
    if batch is None or at is None:
        return
    is_compressed = batch.offset(BATCH_COMPRESSION) is not None
    at += _u32(batch.data, at)
    num_buffers = _u32(batch.data, at)
    if num_buffers > MAX_BUFFERS:
        raise WireError(413, f"a message has more than {MAX_BUFFERS} buffers")
    for index in range(num_buffers):
        offset, length = struct.unpack_from("<qq", batch.data, at + 4 + 16 * index)
        size = _not_negative(length)
        yield _inflated_size(body, _not_negative(offset), size) if is_compressed else size


def _inflated_size(body: memoryview, offset: int, length: int) -> int:
    if not length:
        return 0
    (declared,) = struct.unpack_from("<q", body, offset)
    return length if declared == PLAIN else _not_negative(declared)


def _u32(data: memoryview, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found


def _not_negative(number: int) -> int:
    """Return an offset or length. `struct` would count a negative one from the end."""
    if number < 0:
        raise WireError(422, "the body is not an Arrow stream: it has a negative length")
    return number
