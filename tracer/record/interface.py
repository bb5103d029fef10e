"""The interface of a tracer, and the tracer that records nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..native.choice import do_nothing
from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from ..native.host_span import SpanContext


class Tracer(Protocol):
    """Recorder of this process's spans, as a job uses it. No method raises, blocks or does I/O."""

    @property
    def enabled(self) -> bool:
        """True if anything is recorded."""

    @property
    def run_id(self) -> str:
        """The run's name, "" if nothing is recorded."""
        ...

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.HOST,
        microbatch: int = NONE,
        chunk: int = NONE,
    ) -> SpanContext:
        """Return a span for ``with``."""

    def begin_steps(self, first_step: int = 0) -> None:
        """Begin step ``first_step`` now."""

    def step(self, tokens: int | None = None, loss: object = None) -> None:
        """End the step and begin the next one."""

    def microbatch(
        self, index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
    ) -> None:
        """Record the size of micro-batch ``index`` of this step."""

    def event(self, kind: str, text: str, data: dict[str, object]) -> None:
        """Record an event at this moment."""

    def record_exception(self, exc: BaseException) -> None:
        """Record ``exc`` as the reason for the end of this process."""

    def shutdown(self) -> None:
        """Seal the segments and record the normal end of the process."""


class NoopSpan:
    """A span that is not recorded."""

    __slots__ = ()

    # Static, so that ``with`` makes no bound methods: half the time.
    __enter__ = staticmethod(do_nothing)
    __exit__ = staticmethod(do_nothing)
    cancel = staticmethod(do_nothing)


NOOP_SPAN = NoopSpan()
"""The span of `NOOP_TRACER`."""


class NoopTracer:
    """The tracer of a job without one, so that no caller needs to test for None."""

    __slots__ = ()

    enabled = False
    run_id = ""

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.HOST,
        microbatch: int = NONE,
        chunk: int = NONE,
    ) -> NoopSpan:
        """Return a span that is not recorded."""
        return NOOP_SPAN

    def begin_steps(self, first_step: int = 0) -> None:
        """Do nothing."""

    def step(self, tokens: int | None = None, loss: object = None) -> None:
        """Do nothing."""

    def microbatch(
        self, index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
    ) -> None:
        """Do nothing."""

    def event(self, kind: str, text: str, data: dict[str, object]) -> None:
        """Do nothing."""

    def record_exception(self, exc: BaseException) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


NOOP_TRACER = NoopTracer()
"""The tracer of a job that is not traced."""
