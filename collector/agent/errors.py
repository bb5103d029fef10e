"""Why the agent can't go on just now. All of it passes: nothing is given up by raising."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CollectorError, StoreError

if TYPE_CHECKING:
    from pathlib import Path


class AgentConfigError(CollectorError):
    """The agent can't begin with what it was given."""


class JournalVersionError(AgentConfigError):
    """A newer agent wrote the journal."""

    def __init__(self, path: Path, *, found: int, known: int) -> None:
        super().__init__(
            f"the journal {path} has version {found}, this rankscope knows {known}: upgrade"
            " rankscope; or move the journal away, and the agent asks the collector how far each"
            " segment is stored"
        )
        self.path = path
        self.found = found
        self.known = known


class RetryLaterError(StoreError):
    """What was to be sent stays where it is; it is sent again later, exactly as it was.

    Args:
        reason: One plain line.
        pause_s: How long to leave the collector alone; None: as its failures in a row say.
        is_of_run: Whether only this run is held; else the collector as a whole.
        is_token: Whether another token would help: then a new one is tried at once.
    """

    def __init__(
        self,
        reason: str,
        *,
        pause_s: float | None = None,
        is_of_run: bool = False,
        is_token: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause_s = pause_s
        self.is_of_run = is_of_run
        self.is_token = is_token


class LinkError(RetryLaterError):
    """The collector gave no answer that could be used.

    Args:
        reason: One plain line.
        is_late: Whether a deadline ran out, so that a smaller request may fare better.
    """

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class JournalError(RetryLaterError):
    """The agent's own journal can't be written; nothing is sent that is not in it."""


def reason_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    text = str(error) if not isinstance(error, OSError) else error.strerror or str(error)
    line = (text.strip().splitlines() or [""])[0]
    return (line or type(error).__name__)[:200]


class RejectedError(CollectorError):
    """What was sent is refused for what it is.

    Args:
        status: Of the answer.
        reason: As the answer gives it.
        is_of_collector: Whether the collector itself says so; else something before it, a proxy
            say, lets no body of that length through.
    """

    def __init__(self, status: int, reason: str, *, is_of_collector: bool = True) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason
        self.is_of_collector = is_of_collector


class RunGoneError(CollectorError):
    """The run was deleted: nothing more of it is wanted."""
