"""Steps and diagnoses as they are logged, and the interface of a tracker."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_ranks

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding

PREFIX = "rankscope/"
"""Begin of the names of all that is logged: trackers group values by it."""


def level_of(severity: Severity | None) -> str:
    """Return the level of a severity: the names are those of trackio and of OpenTelemetry."""
    return {Severity.CRITICAL: "ERROR", Severity.WARNING: "WARN"}.get(
        severity or Severity.NONE, "INFO"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step of a run."""

    step: int
    end_ns: int
    """Unix ns."""

    step_time_s: float
    mfu: float | None
    """0..1; None if unknown."""

    slowdown: float | None
    """Actual / ideal; None if unknown."""

    def values(self) -> dict[str, float]:
        """Return the known values by the names under which trackers show them."""
        named = {
            "step_time_s": self.step_time_s,
            "mfu": self.mfu,
            "slowdown": self.slowdown,
        }
        return {f"{PREFIX}{name}": value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The newest report of a run, for a tracker."""

    step: int
    """Newest step of the report; -1 without one."""

    at_ns: int
    """End of the newest step that is logged with it, else the time of the diagnosis; Unix ns."""

    verdict: str
    severity: Severity
    link: str
    """Where it is shown: an address, or the command that leads to it."""

    findings: tuple[Finding, ...]

    def to_markdown(self) -> str:
        """Return verdict, findings and link for a field that shows Markdown."""
        lines = []
        for finding in self.findings:
            ranks = format_ranks(finding.ranks) if finding.ranks else ""
            about = ", ".join(filter(None, (finding.severity, ranks)))
            lines.append(f"* **{finding.cause}** ({about}): {_escape(finding.evidence)}")
        is_address = self.link.startswith("http")
        place = f"[Open it in rankscope]({self.link})" if is_address else f"`{self.link}`"
        return "\n".join([f"**{_escape(self.verdict)}**", "", place, "", *lines, ""])


def _escape(text: str) -> str:
    """Return a text without markup of its own."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>|#" else letter for letter in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run, and where it is logged."""

    run: str
    started_ns: int
    into: str | None
    """A tracker's run, folder or endpoint; None: a new one, by the tracker's own settings."""


class Sink(Protocol):
    """A tracker that takes a run. A failure to write is an exception: the rows are sent again.

    What a call has written is durable, or sent, or with the tracker's own process or thread.
    """

    into: str
    """Where it writes, such that a sink that is opened there continues it."""

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Write steps, ascending and each once."""

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Write a diagnosis that differs from the last one, with the findings that did not have."""

    def close(self, *, has_ended: bool) -> None:
        """Close it; `has_ended` says whether the run is over."""


def need(module: str, packages: str) -> Any:  # noqa: ANN401  # a module of a user's choice
    """Return a module that is installed by those who use it.

    Args:
        module: Its name.
        packages: What `pip` installs for it.

    Raises:
        BadInputError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise BadInputError(f"{error.name} is not installed: pip install {packages}") from error
