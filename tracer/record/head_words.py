"""The first word of host spans' records, by name and kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..span import KIND_CODES, SpanFlag, SpanKind
from ..spool import NAME_BYTES, NAME_CAPACITY, DropReason, RecordType
from .lane import head_word

if TYPE_CHECKING:
    from .arguments import Arguments
    from .process_file import ProcessFile


class HeadWords:
    """Makes each word once."""

    __slots__ = ("_arguments", "_process", "_words")

    def __init__(self, process: ProcessFile, arguments: Arguments) -> None:
        self._process = process
        self._arguments = arguments
        self._words: dict[tuple[str, SpanKind], int] = {}

    def of(self, name: object, kind: object) -> int:
        """Return `tracer.record.lane.head_word` of a host span; what cannot be used is replaced."""
        if type(name) is str and type(kind) is SpanKind:
            known = self._words.get((name, kind))
            if known is not None:
                return known
        if type(kind) is not SpanKind:
            self._process.drop(DropReason.BAD_ARGUMENT)
            kind = SpanKind.OTHER
        head = head_word(
            RecordType.SPAN,
            kind=KIND_CODES[kind],
            flags=int(SpanFlag.HOST_CLOCK),
            name_id=self._process.name_id(self._arguments.name(name)),
        )
        # Names of the caller's choosing: without a bound this would grow for ever.
        is_bounded = len(self._words) < NAME_CAPACITY
        if type(name) is str and 0 < len(name) < NAME_BYTES and is_bounded:
            self._words[name, kind] = head
        return head

    def has(self, kind: SpanKind) -> bool:
        """Return whether a span of ``kind`` was ever begun."""
        return any(known is kind for _, known in self._words)
