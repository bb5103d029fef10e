"""Errors of a capture: counted, reported, and kept away from the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec

from ..errors import is_tracer_error
from ..spool import DropReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..record.recorder import Recorder
    from ..span import SpanKind

P = ParamSpec("P")


def report_capture_failure(
    recorder: Recorder, text: str, problem: BaseException, kinds: Iterable[SpanKind] = ()
) -> None:
    """Count and report that a capture failed and records nothing more.

    Args:
        kinds: Span kinds that the capture recorded. The records of this step and of all later ones
            list them as missing, so that the analysis does not take the gaps for idle time.
    """
    recorder.missing_kinds.add_permanent(kinds)
    recorder.drop(DropReason.INTERNAL_ERROR)
    recorder.event("tracer", text, {"error": repr(problem)[:500]})


class Guard:
    """Calls functions of a capture until one of them fails, then turns the capture off."""

    def __init__(self, recorder: Recorder, what: str, kinds: Iterable[SpanKind] = ()) -> None:
        """Create the guard of an active capture.

        Args:
            what: Name of the capture.
            kinds: Span kinds that are missing after a failure.
        """
        self.active = True
        self._recorder = recorder
        self._what = what
        self._kinds = kinds

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``function`` if the capture is active.

        Raises:
            Exception: A signal handler of the job raised it during the call.
        """
        if not self.active:
            return
        try:
            function(*args, **kwargs)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def fail(self, problem: Exception) -> None:
        """Turn the capture off after an error of its own.

        A hot path checks `active` and calls this itself instead of `call`.

        Raises:
            Exception: ``problem`` itself, if a signal handler of the job raised it.
        """
        if not is_tracer_error(problem):
            raise problem
        self.active = False
        text = f"{self._what} capture turned itself off"
        report_capture_failure(self._recorder, text, problem, self._kinds)
