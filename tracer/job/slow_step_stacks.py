"""Python stacks of all threads as an event: of slow steps, and of those requested."""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..errors import PACKAGE_FOLDER
from ..native.choice import frames_of_threads
from ..record.control import Requests
from ..span import NONE, NS_PER_S
from ..spool import STACKS
from .system_calls import blocking_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..native.choice import FrameLine
    from ..record.control import Request
    from ..record.recorder import Recorder

MAX_REQUESTED_DUMPS = 400
"""In the life of a process."""

REMEMBERED_STEPS = 64
MIN_STEPS = 8
"""With fewer steps the typical duration is unknown."""

FIRST_LIMIT_NS = 30 * NS_PER_S
"""Limit until then: a job often hangs in its first steps. Half of the silence that is a stall."""

MIN_EXCESS_RATIO = 0.1
ROBUST_DEVIATIONS = 4.0
DEVIATION_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

MAX_DUMPS_A_STEP = 4
MAX_DUMPS = 200
PAUSE_NS = 60 * NS_PER_S
"""Between the first dumps of two slow steps, of which a job may have thousands."""

MAX_THREADS = 32
MAX_FRAMES = 60
MAX_OWN_FRAMES = 60
"""Frames of the tracer, which are skipped."""

MAX_FRAME_TEXT = 200


def slow_after_ns(durations_ns: Iterable[int]) -> int | None:
    """Return the duration above which a step is slow; None while too few steps are known.

    ``median + max(10 % of it, 4 robust deviations)`` of the last steps. The robust deviation is
    1.4826 x the median absolute deviation.

    Args:
        durations_ns: Durations of the last steps, ns.

    Source:
        The thresholds of a finding: an excess of 10 % on one rank (the limit above which arXiv
        2505.05713 counts a job as straggling) that is clear of the noise. Leys et al. 2013 (J. Exp.
        Soc. Psychol. 49, 764) for the estimate; their "very conservative" limit is 3 deviations.
    """
    durations = list(durations_ns)
    if len(durations) < MIN_STEPS:
        return None
    typical_ns = median(durations)
    mad_ns = median(abs(duration_ns - typical_ns) for duration_ns in durations)
    noise_ns = ROBUST_DEVIATIONS * DEVIATION_PER_MAD * mad_ns
    return round(typical_ns + max(MIN_EXCESS_RATIO * typical_ns, noise_ns))


class SlowStepWatch:
    """Checks once a second, on the background thread, whether the running step is slow.

    The stacks of a slow step are recorded when it is noticed, and again at 2, 4 and 8 times the
    limit: in a hang this shows whether anything moves. Which rank causes a slow step can only be
    known across ranks, so each rank records its own stacks.
    """

    def __init__(self, recorder: Recorder, *, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._recorder = recorder
        self._now_ns = now_ns
        self._durations_ns: deque[int] = deque(maxlen=REMEMBERED_STEPS)
        self._start_ns: int | None = None
        self._dumped_start_ns: int | None = None
        self._last_dump_ns: int | None = None
        self._dumps_of_step = 0
        self._dumps_left = MAX_DUMPS

    def step_begins(self) -> bool:
        """Note that a step begins; always return False, to be called again. Training thread."""
        start_ns, before_ns = self._recorder.step_start_ns, self._start_ns
        if start_ns is not None and before_ns is not None:
            self._durations_ns.append(start_ns - before_ns)
        self._start_ns = start_ns
        return False

    def check(self) -> None:
        """Record the stacks if the running step is slow and a dump is due."""
        start_ns, step = self._recorder.step_start_ns, self._recorder.step_number
        durations_ns = list(self._durations_ns)
        if start_ns is None or not self._dumps_left:
            return
        now_ns = self._now_ns()
        # The common case: no limit is below the shortest step, and the limit is expensive to
        # compute.
        if now_ns - start_ns <= min(durations_ns, default=FIRST_LIMIT_NS):
            return
        limit_ns = slow_after_ns(durations_ns) or FIRST_LIMIT_NS
        if not self._should_dump(start_ns, now_ns, limit_ns) or start_ns != self._start_ns:
            return
        self._dumps_left -= 1
        self._last_dump_ns = now_ns
        typical_ns = round(median(durations_ns)) if durations_ns else None
        usually = "" if typical_ns is None else f", usually {typical_ns / NS_PER_S:.1f} s"
        self._recorder.event(
            "stack",
            f"step {step} has lasted {(now_ns - start_ns) / NS_PER_S:.1f} s{usually}",
            {
                "step": step,
                "elapsed_ns": now_ns - start_ns,
                "usual_ns": typical_ns,
                "late_after_ns": limit_ns,
                "threads": stacks(),
            },
        )

    def _should_dump(self, start_ns: int, now_ns: int, limit_ns: int) -> bool:
        """Return whether a dump is due at this moment of this step; if so, count it."""
        is_same = start_ns == self._dumped_start_ns
        dumped = self._dumps_of_step if is_same else 0
        if dumped >= MAX_DUMPS_A_STEP or now_ns - start_ns <= limit_ns << dumped:
            return False
        is_long = now_ns - start_ns > limit_ns << MAX_DUMPS_A_STEP  # a hang does not wait
        has_paused = self._last_dump_ns is None or now_ns - self._last_dump_ns >= PAUSE_NS
        if not (is_same or is_long or has_paused):
            return False
        self._dumped_start_ns, self._dumps_of_step = start_ns, dumped + 1
        return True


class RequestedStacks:
    """Records the stacks of requested steps, once a step, on the background thread.

    The first dump does not wait for a step to begin: the process may hang.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._requests = Requests(
            STACKS,
            rank=recorder.identity.rank,
            report=lambda text, data: recorder.event("control", text, data),
        )
        self._request: Request | None = None
        self._num_dumped = 0
        self._step: int | None = None
        """Step of the last dump."""

        self._dumps_left = MAX_REQUESTED_DUMPS

    def take_control(self, document: Mapping[str, object]) -> None:
        """Take the request of a control file."""
        request = self._requests.take(document)
        if request is not None:
            self._request, self._num_dumped, self._step = request, 0, None

    def check(self) -> None:
        """Record the stacks if they are requested and were not recorded in this step."""
        request, step = self._request, self._recorder.step_number
        if request is None or step == self._step or step < (request.first_step or NONE):
            return
        if not self._dumps_left:
            self._request = None
            text = f"refused: the limit of {MAX_REQUESTED_DUMPS} requested stacks is reached"
            self._recorder.event("control", text, request.describe("refused"))
            return
        self._dumps_left -= 1
        self._num_dumped += 1
        self._step = step
        if self._num_dumped == request.num_steps:
            self._request = None
        start_ns = self._recorder.step_start_ns
        where = "outside any step" if step == NONE else f"in step {step}"
        self._recorder.event(
            "stack",
            f"stacks {where}, requested",
            {
                **request.describe("done"),
                "step": step,
                "elapsed_ns": None if start_ns is None else monotonic_ns() - start_ns,
                "threads": stacks(),
            },
        )


def median(numbers: Iterable[float]) -> float:
    """Return the middle of ``numbers``; of an even count, the mean of the middle two."""
    # Not from `statistics`, whose import takes longer than that of the whole tracer.
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def stacks() -> list[dict[str, object]]:
    """Return the Python stack of each thread but the calling one, innermost frame first.

    The numbers of threads, frames and characters are limited. No code of the job runs: neither its
    ``repr`` nor its source files are read. The tracer's own frames are left out. The main thread
    comes first, with the system call on a file in which it is blocked (``call``).
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: list[dict[str, object]] = [
        {"name": names.get(ident, str(ident)), "frames": _texts(lines)}
        for ident, lines in frames_of_threads(MAX_FRAMES + MAX_OWN_FRAMES)
    ]
    main = threading.main_thread().name
    stacks.sort(key=lambda thread: thread["name"] != main)
    call = blocking_call()
    if call and stacks and stacks[0]["name"] == main:
        stacks[0]["call"] = call[-MAX_FRAME_TEXT:]
    return stacks[:MAX_THREADS]


def watch_slow_steps(recorder: Recorder) -> None:
    """Record the stacks of slow steps, and requested ones, as events from now on."""
    watch, requested = SlowStepWatch(recorder), RequestedStacks(recorder)
    recorder.on_step_begin(watch.step_begins)
    recorder.on_tick(watch.check)
    recorder.on_control(requested.take_control)
    recorder.on_tick(requested.check)


def _texts(lines: Iterable[FrameLine]) -> list[str]:
    return [
        f"{code.co_filename}:{number} {code.co_qualname}"[-MAX_FRAME_TEXT:]
        for code, number in lines
        if not code.co_filename.startswith(PACKAGE_FOLDER)
    ][:MAX_FRAMES]
