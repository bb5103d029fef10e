"""Pickles of plain values, as PyTorch's flight recorder writes them.

Nothing of a file is run: there is no opcode for a class, a function or an extension. Values are
None, booleans, numbers, texts, bytes, lists, tuples, and dictionaries whose keys are texts, or
numbers, which become texts (torch 2.3 lists groups by number).

Source: the opcodes as Python's ``pickletools`` documents them, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_VALUES = 1_000_000
"""Different values of one file, with those that it numbers to use them again. A dump has some 20
for each communication, and 2,000 communications by default."""

MAX_OPCODES = 8_000_000
"""Of one file: each use of a value is one."""

MAX_NUMBER_BYTES = 16
MAX_TEXT_BYTES = 1 << 16


class PlainPickleError(ValueError):
    """Bytes that are no pickle of plain values, or one that is too large."""


UINT8, UINT16, INT32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i")
UINT32, UINT64, FLOAT = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct(">d")


def _read_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _read_number(raw: bytes) -> int:
    if len(raw) > MAX_NUMBER_BYTES:
        raise PlainPickleError(f"it has a number of {len(raw):,} bytes")
    return int.from_bytes(raw, "little", signed=True)


CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
NUMBERS = {ord("K"): UINT8, ord("M"): UINT16, ord("J"): INT32, ord("G"): FLOAT}
SIZED: dict[int, tuple[struct.Struct, Callable[[bytes], Any]]] = {
    0x8C: (UINT8, _read_text),
    ord("X"): (UINT32, _read_text),
    0x8D: (UINT64, _read_text),
    ord("C"): (UINT8, bytes),
    ord("B"): (UINT32, bytes),
    0x8E: (UINT64, bytes),
    0x8A: (UINT8, _read_number),
    0x8B: (UINT32, _read_number),
}
"""Size of a text, bytes or a long number after its opcode, and the reader of its value."""

EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord("}"): dict, ord(")"): tuple}
TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
MEMO_BYTES = {ord("q"): 1, ord("h"): 1, ord("r"): 4, ord("j"): 4}
PUTS = frozenset({ord("q"), ord("r")})
PROTO, FRAME, MARK, STOP, MEMOIZE = 0x80, 0x95, ord("("), ord("."), 0x94
SKIPPED = {PROTO: 1, FRAME: 8}
APPEND, APPENDS, SETITEM, SETITEMS, TUPLE, LIST, DICT = map(ord, "aesutld")


def load_plain_pickle(data: bytes) -> Any:  # noqa: ANN401  # any plain value
    """Return the value of a pickle.

    Raises:
        PlainPickleError: It is none of plain values, is not complete, or has more than
            `MAX_VALUES` or `MAX_OPCODES`.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error):
        raise PlainPickleError("it is cut off, or no pickle") from None
    except (KeyError, TypeError, AttributeError):
        raise PlainPickleError("its values do not fit together") from None


class _Machine:
    """The stack of a pickle and what it numbers, at one place in its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        """Stacks below the marks that are open."""

        self._memo: dict[int, Any] = {}
        self._num_values = 0

    def run(self) -> Any:  # noqa: ANN401  # any plain value
        """Run all opcodes and return the value that is left."""
        data, num_opcodes = self._data, 0
        while True:
            opcode = data[self._at]
            self._at += 1
            num_opcodes += 1
            if num_opcodes > MAX_OPCODES or self._num_values + len(self._memo) > MAX_VALUES:
                raise PlainPickleError("it has more values than a dump")
            if opcode in MEMO_BYTES:
                size = MEMO_BYTES[opcode]
                number = int.from_bytes(data[self._at : self._at + size], "little")
                self._at += size
                if opcode in PUTS:
                    self._memo[number] = self._stack[-1]
                else:
                    self._stack.append(self._memo[number])
            elif opcode in NUMBERS:
                layout = NUMBERS[opcode]
                self._stack.append(layout.unpack_from(data, self._at)[0])
                self._at += layout.size
                self._num_values += 1
            elif opcode in CONSTANTS:
                self._stack.append(CONSTANTS[opcode])
            elif opcode in SIZED:
                layout, read = SIZED[opcode]
                size = layout.unpack(self._take(layout.size))[0]
                self._stack.append(read(self._take(size)))
                self._num_values += 1
            elif opcode == MEMOIZE:
                self._memo[len(self._memo)] = self._stack[-1]
            elif opcode in SKIPPED:
                self._at += SKIPPED[opcode]
            elif opcode == STOP:
                return self._stack.pop()
            else:
                self._build(opcode)

    def _take(self, size: int) -> bytes:
        if size > MAX_TEXT_BYTES:
            raise PlainPickleError(f"it has a value of {size:,} bytes")
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise PlainPickleError("it is cut off")
        self._at += size
        return taken

    def _build(self, opcode: int) -> None:
        if opcode == MARK:
            self._outer.append(self._stack)
            self._stack = []
            self._num_values += 1
        elif opcode in EMPTY:
            self._num_values += 1
            self._stack.append(EMPTY[opcode]())
        elif opcode in TUPLES:
            self._num_values += 1
            num = TUPLES[opcode]
            if len(self._stack) < num:
                raise PlainPickleError("its values do not fit together")
            self._stack[-num:] = [tuple(self._stack[-num:])]
        elif opcode in MAKERS:
            values = self._pop_to_mark()
            self._stack.append(MAKERS[opcode](values))
        elif opcode in {APPEND, SETITEM}:
            num = 1 if opcode == APPEND else 2
            values = [self._stack.pop() for _ in range(num)][::-1]
            self._put(values, is_list=opcode == APPEND)
        elif opcode in {APPENDS, SETITEMS}:
            self._put(self._pop_to_mark(), is_list=opcode == APPENDS)
        else:
            raise PlainPickleError(
                f"it has opcode 0x{opcode:02x}, which plain values do not need: nothing was loaded"
            )

    def _pop_to_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _put(self, values: list[Any], *, is_list: bool) -> None:
        target = self._stack[-1]
        if is_list and isinstance(target, list):
            target.extend(values)
        elif not is_list and isinstance(target, dict):
            target.update(_to_dict(values))
        else:
            raise PlainPickleError("its values do not fit together")


def _to_dict(values: list[Any]) -> dict[str, Any]:
    keys = values[::2]
    if len(values) % 2 or not all(type(key) in {str, int} for key in keys):
        raise PlainPickleError("a key of a dictionary is neither a text nor a number")
    return dict(zip(map(str, keys), values[1::2], strict=True))


MAKERS: dict[int, Callable[[list[Any]], Any]] = {TUPLE: tuple, LIST: list, DICT: _to_dict}
"""Of a container of the values above the newest mark."""
