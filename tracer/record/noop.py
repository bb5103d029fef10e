"""The tracer that does nothing."""

from __future__ import annotations

from ..native.choice import nothing
from ..span import NONE, SpanKind


class NoopSpan:
    """A span that nobody records."""

    __slots__ = ()

    # Static, so that ``with`` makes no bound methods: half the time.
    __enter__ = staticmethod(nothing)
    __exit__ = staticmethod(nothing)
    cancel = staticmethod(nothing)


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
