"""Why a server of the store does not answer, in words that fit one line and hold no address."""

from __future__ import annotations

NO_ANSWER = "the store's server does not answer"


def unreachable_reason(error: BaseException) -> str | None:
    """Return why a request came to no answer; None where the server did answer.

    The driver's own text holds the request's whole address: every bound value, and a new number
    at each try, so that no two tries say the same.

    Args:
        error: What the driver raised.
    """
    from urllib3.exceptions import HTTPError

    if not isinstance(error.__cause__, HTTPError):
        return None
    return f"{NO_ANSWER} ({_innermost(error.__cause__)})"


def _innermost(error: BaseException) -> str:
    """Return what the system said, or else what kind of error it was."""
    found: BaseException = error
    seen: set[int] = set()
    while id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        reason = getattr(found, "reason", None)
        inner = (
            reason if isinstance(reason, BaseException) else found.__cause__ or found.__context__
        )
        found = inner or found
    return "timed out" if "Timeout" in type(found).__name__ else type(found).__name__
