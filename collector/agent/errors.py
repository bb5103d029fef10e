"""Errors of the agent. A `RetryLaterError` loses nothing: the same data is sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CollectorError, StoreError

if TYPE_CHECKING:
    from pathlib import Path


class AgentConfigError(CollectorError):
    """The agent can't start with its configuration."""


class StateFolderError(AgentConfigError):
    """Another user can change the state folder, or it can't be created."""


class JournalVersionError(AgentConfigError):
    """A newer agent wrote the journal."""

    def __init__(self, path: Path, *, found: int, known: int) -> None:
        super().__init__(
            f"the journal {path} has version {found}, this rankscope knows {known}: upgrade"
            " rankscope; or move the journal away, and the agent asks the collector how far each"
            " segment is stored"
        )


class RetryLaterError(StoreError):
    """Unsent data stays in the spool and is sent again unchanged later.

    Args:
        pause_s: Pause before the next attempt; None: that of the backoff.
        is_run_only: Whether only this run must wait, and not the collector as a whole.
        is_token_problem: Whether a new token would help; then it is tried at once.
    """

    def __init__(
        self,
        reason: str,
        *,
        pause_s: float | None = None,
        is_run_only: bool = False,
        is_token_problem: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause_s = pause_s
        self.is_run_only = is_run_only
        self.is_token_problem = is_token_problem


class LinkError(RetryLaterError):
    """The collector gave no valid answer.

    Args:
        is_late: Whether a deadline passed, so that a smaller request may succeed.
    """

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class JournalError(RetryLaterError):
    """The journal can't be read or written. Nothing is sent that is not in it."""


class RejectedError(CollectorError):
    """The collector rejects the content of a request.

    Args:
        is_from_collector: Whether the collector itself rejects it, and not a proxy before it that
            limits the length of bodies.
    """

    def __init__(self, status: int, reason: str, *, is_from_collector: bool = True) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason
        self.is_from_collector = is_from_collector


class RunGoneError(CollectorError):
    """The run was deleted at the collector."""


def reason_of(error: BaseException) -> str:
    """Return the message of an error in one line."""
    text = str(error) if not isinstance(error, OSError) else error.strerror or str(error)
    line = (text.strip().splitlines() or [""])[0]
    return (line or type(error).__name__)[:200]
