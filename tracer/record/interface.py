"""What a job may ask of a tracer, whether it records or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..native.choice import do_nothing
from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from ..native.host_span import SpanContext


class Tracer(Protocol):
    """Records spans of this process. No method raises, blocks or does I/O."""

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        ...

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
        """Return a span to be entered with ``with``."""
        ...

    def begin_steps(self, first_step: int = 0) -> None:
        """Say that step ``first_step`` begins now."""
        ...

    def step(self, tokens: int | None = None, loss: object = None) -> None:
        """Say that the step ends now and the next begins."""
        ...

    def microbatch(
        self, index: int, tokens: int | None = None, sum_squared_lengths: int | None = None
    ) -> None:
        """Note what micro-batch ``index`` of this step holds."""
        ...

    def event(self, kind: str, text: str, data: dict[str, object]) -> None:
        """Note something that happened at this moment."""
        ...

    def record_exception(self, exc: BaseException) -> None:
        """Note that ``exc`` ends this process."""
        ...

    def shutdown(self) -> None:
        """Say goodbye: seal what is written and record the end."""
        ...


class NoopSpan:
    """A span that nobody records."""

    __slots__ = ()

    # Static, so that ``with`` makes no bound methods: half the time.
    __enter__ = staticmethod(do_nothing)
    __exit__ = staticmethod(do_nothing)
    cancel = staticmethod(do_nothing)


NOOP_SPAN = NoopSpan()
"""A span that nobody records."""


class NoopTracer:
    """Stands where no tracer is installed, so that no caller asks whether there is one."""

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
        """Return a span that nobody records."""
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
