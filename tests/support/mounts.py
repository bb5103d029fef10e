"""Whether this machine lets a test mount a disk that nobody else sees."""

from __future__ import annotations

import subprocess
import tempfile

from tests.support.missing_tools import lacks

PROBE = ("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs")
NO_MOUNTS = (
    "this machine allows no mounts in a namespace of one's own ({reason}): allow user namespaces"
    " (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or run as root"
)


def needs_mounts() -> None:
    """Go on only where mounts in a namespace of one's own are allowed."""
    reason = why_no_mounts()
    if reason is not None:
        lacks(NO_MOUNTS.format(reason=reason))


def why_no_mounts() -> str | None:
    """Return why nothing can be mounted, in one line; None where it can."""
    try:
        tried = subprocess.run(
            [*PROBE, tempfile.gettempdir()], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"unshare: {error.strerror}"
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[0]
