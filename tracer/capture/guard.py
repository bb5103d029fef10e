"""Keep a capture's own errors away from the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec

from tracer.blame import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracer.recorder import Recorder
    from tracer.span import SpanKind

P = ParamSpec("P")


class Guard:
    """Calls a capture's functions until one fails; that is counted, told, and ends the capture."""

    def __init__(self, recorder: Recorder, what: str, kinds: Iterable[SpanKind] = ()) -> None:
        """Begin with a sound capture.

        Args:
            recorder: Where its end is told.
            what: The capture's name.
            kinds: What nobody records once it has ended.
        """
        self.active = True
        self._recorder = recorder
        self._what = what
        self._kinds = kinds

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``function``, unless the capture has ended.

        Raises:
            Exception: What a signal handler of the job raised meanwhile.
        """
        if not self.active:
            return
        try:
            function(*args, **kwargs)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def fail(self, problem: Exception) -> None:
        """End the capture after an error of its own; a hot one asks `active` and calls this itself.

        Raises:
            Exception: ``problem`` itself, where a signal handler of the job raised it.
        """
        if not is_ours(problem):
            raise problem
        self.active = False
        text = f"{self._what} capture turned itself off"
        self._recorder.capture_failed(text, problem, kinds=self._kinds)
