"""Keep a capture's own errors away from the job."""

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
    """Count and tell that a capture has ended for an error of ours, or never began.

    Args:
        recorder: Where it is told.
        text: Which, in words.
        problem: The error.
        kinds: What it would have recorded: the records of this step and of all later ones say
            that these are missing, so that nobody takes the gaps for idleness.
    """
    recorder.missing_kinds.add_permanent(kinds)
    recorder.drop(DropReason.INTERNAL_ERROR)
    recorder.event("tracer", text, {"error": repr(problem)[:500]})


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
        if not is_tracer_error(problem):
            raise problem
        self.active = False
        text = f"{self._what} capture turned itself off"
        report_capture_failure(self._recorder, text, problem, self._kinds)
