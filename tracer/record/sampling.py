"""Sampling: the settings that decide which spans are recorded, and their control file."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, cast

from ..span import COMM_KINDS, KIND_CODES, NONE, SpanKind, pack_kinds
from ..spool import FULL
from .control import Control, Requests
from .plain_values import INT32_MAX, plain_int, plain_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .control import Request

ALL_KINDS = (1 << len(KIND_CODES)) - 1
"""All kinds as a bit mask: only steps, micro-batches and events are recorded."""

REMEMBERED_STEPS = 64
"""Number of past steps whose settings are kept, for spans that end late (asynchronous ones)."""

_STEP = struct.Struct("<i")


_COMM = COMM_KINDS | {SpanKind.WAIT}
_MANUAL = frozenset({SpanKind.HOST, SpanKind.OTHER})

LEVELS: dict[str, int] = {
    "steps": ALL_KINDS,
    "comm": ALL_KINDS & ~pack_kinds(_COMM),
    "compute": pack_kinds(_MANUAL),
    "all": 0,
}
"""Bit mask of the kinds that each level leaves out.

``steps`` records no span; ``comm`` communication and waits; ``compute`` all but
`SpanKind.HOST` and `SpanKind.OTHER`; ``all`` everything.
"""


class SettingError(ValueError):
    """A setting has a value that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the recording."""

    recording: bool = True
    """False: no spans; steps, micro-batches and events are still recorded."""

    level: str = "all"
    """One of `LEVELS`."""

    sample_every: int = 1
    """Spans are recorded in steps whose number this divides, the same steps on all ranks."""

    def __post_init__(self) -> None:
        if type(self.recording) is not bool:
            raise SettingError("recording must be true or false")
        if self.level not in LEVELS:
            raise SettingError(f"level must be one of {', '.join(LEVELS)}")
        if not 1 <= self.sample_every <= INT32_MAX:
            raise SettingError("sample_every must be a whole number, 1 or more")

    def left_out(self, step: int) -> int:
        """Return the bit mask (`pack_kinds`) of the kinds not recorded in ``step``.

        `NONE`, work outside any step such as start-up, counts as a sampled step.
        """
        if not self.recording or (step != NONE and step % self.sample_every):
            return ALL_KINDS
        return LEVELS[self.level]


EVERYTHING = Settings()


def update_settings(settings: Settings, document: Mapping[str, object]) -> Settings:
    """Return ``settings`` with the values of ``document``; unknown keys are ignored.

    Raises:
        SettingError: A value cannot be used; the message names its key.
    """
    level = plain_text(document.get("level", settings.level))
    sample_every = document.get("sample_every", settings.sample_every)
    number = None if type(sample_every) is bool else plain_int(sample_every)
    recording = cast("bool", document.get("recording", settings.recording))  # checked by `Settings`
    return replace(settings, recording=recording, level=level or "", sample_every=number or 0)


def read_first_step(document: Mapping[str, object]) -> int | None:
    """Return the step from which ``document`` applies; None for the next step that begins.

    Raises:
        SettingError: ``from_step`` is not a step number.
    """
    value = document.get("from_step")
    if value is None:
        return None
    number = None if type(value) is bool else plain_int(value, limit=INT32_MAX)
    if number is None or number < 0:
        raise SettingError("from_step must be a step number, 0 or more")
    return number


class Sampling:
    """The settings in force, and those of the last steps. They change at step boundaries only."""

    __slots__ = (
        "_by_step", "_next", "active", "full_request", "full_steps", "left_out", "requested",
        "settings",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.left_out = settings.left_out(NONE)
        """Bit mask of the kinds not recorded now."""

        self.active = bool(self.left_out)
        """Whether any kind was left out in one of the remembered steps."""

        self.requested: Request | None = None
        """Request of `EVERYTHING`, until its first step begins."""

        self.full_request: Request | None = None
        """The last request whose first step has begun."""

        self.full_steps = range(0)
        """Its steps."""

        self._by_step: dict[int, int] = {NONE: self.left_out}
        self._next: tuple[int | None, Settings] | None = None

    def schedule(self, settings: Settings, first_step: int | None) -> None:
        """Apply ``settings`` from step ``first_step`` on, or from the next step if it is None."""
        self._next = (first_step, settings)

    def begin_step(self, step: int) -> bool:
        """Apply the settings of ``step``; return whether other kinds are left out than before.

        Args:
            step: The step that begins; `NONE` if no step has begun, when settings without a first
                step apply at once.
        """
        scheduled = self._next
        if scheduled is not None and (scheduled[0] is None or NONE < scheduled[0] <= step):
            self.settings = scheduled[1]
            if self._next is scheduled:  # the background thread may have scheduled newer ones
                self._next = None
        request = self.requested
        if request is not None and step >= (request.first_step or 0):
            if self.requested is request:  # as above
                self.requested = None
            self.full_request = request
            self.full_steps = range(step, step + request.num_steps)
        settings = EVERYTHING if step in self.full_steps else self.settings
        before, self.left_out = self.left_out, settings.left_out(step)
        self._by_step.pop(step, None)
        self._by_step[step] = self.left_out
        if len(self._by_step) > REMEMBERED_STEPS:
            del self._by_step[next(iter(self._by_step))]
        if self.left_out or self.active:
            self.active = any(self._by_step.values())
        return self.left_out != before

    def leaves_out(self, head: int, place: bytes) -> bool:
        """Return whether a span is left out, by the settings of the step in which it began.

        Args:
            head: `tracer.record.lane.head_word`.
            place: `tracer.native.lane_state.PLACE`.
        """
        left_out = self._by_step.get(_STEP.unpack_from(place)[0], self.left_out)
        return bool(left_out >> ((head >> 8) & 0xFF) & 1)


class SamplingControl:
    """The sampling of a process as its control files set it."""

    def __init__(
        self,
        process_folder: Path,
        first: Settings,
        *,
        rank: int,
        report: Callable[[str, dict[str, object]], None],
        on_invalid: Callable[[], None],
    ) -> None:
        self.sampling = Sampling(first)
        self.on_kinds_changed: Callable[[], None] = _ignore
        """Called when other kinds are recorded than before."""

        self.control = Control(process_folder, on_problem=self._report_problem)
        self._first = first
        self._step = NONE
        self._report = report
        self._requests = Requests(FULL, rank=rank, report=report)
        self._on_invalid = on_invalid
        self.control.subscribe(self._schedule)

    def begin_step(self, step: int) -> None:
        """Apply the settings of ``step``, and report a change."""
        self._step = step
        before, request = self.sampling.settings, self.sampling.full_request
        if self.sampling.begin_step(step):
            self.on_kinds_changed()
        now = self.sampling.settings
        if now is not before and now != before:
            self._report(f"settings changed at step {step}", {**asdict(now), "step": step})
        done = self.sampling.full_request
        if done is not None and done is not request:
            last = self.sampling.full_steps[-1]
            self._report(
                f"everything is recorded in steps {step} to {last}",
                {**done.describe("done"), "steps": [step, last]},
            )

    def _schedule(self, document: Mapping[str, object]) -> None:
        try:
            self.sampling.schedule(
                update_settings(self._first, document), read_first_step(document)
            )
        except SettingError as problem:
            self._report_problem(str(problem))
        self.sampling.requested = self._requests.take(document) or self.sampling.requested
        if self._step == NONE:  # a step may begin much later, or never
            self.begin_step(NONE)

    def _report_problem(self, problem: str) -> None:
        self._on_invalid()
        self._report(problem, {})


def _ignore() -> None:
    pass
