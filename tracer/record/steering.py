"""What the control file asks of the recording itself, brought into force step by step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ..span import NONE
from .control import Control
from .sampling import Sampling, SettingError, Settings, changed, first_step_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Steering:
    """Follows the control files of a process."""

    def __init__(
        self,
        process_folder: Path,
        first: Settings,
        *,
        tell: Callable[[str, dict[str, object]], None],
        on_bad: Callable[[], None],
    ) -> None:
        self.sampling = Sampling(first)
        self.on_keeping_changed: Callable[[], None] = _nothing
        """Called when other kinds are kept than before."""

        self.control = Control(process_folder, on_problem=self._tell_problem)
        self._first = first
        self._step = NONE
        self._tell = tell
        self._on_bad = on_bad
        self.control.tell(self._take)

    def begin_step(self, step: int) -> None:
        """Let settings that were offered for ``step`` hold, and tell when they change."""
        self._step = step
        before = self.sampling.settings
        if self.sampling.begin_step(step):
            self.on_keeping_changed()
        now = self.sampling.settings
        if now is not before and now != before:
            self._tell(f"settings changed at step {step}", {**asdict(now), "step": step})

    def _take(self, document: Mapping[str, object]) -> None:
        try:
            self.sampling.offer(changed(self._first, document), first_step_of(document))
        except SettingError as problem:
            self._tell_problem(str(problem))
        if self._step == NONE:  # no step will begin soon, or ever
            self.begin_step(NONE)

    def _tell_problem(self, problem: str) -> None:
        self._on_bad()
        self._tell(problem, {})


def _nothing() -> None:
    pass
