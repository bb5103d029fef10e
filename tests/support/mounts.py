"""Check for private mounts: some tests mount a small disk in a namespace."""

from __future__ import annotations

import subprocess
import tempfile

from tests.support.missing_tools import skip_for_missing

PROBE = ("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs")
NO_MOUNTS = (
    "this machine allows no mounts in a private namespace ({reason}): allow user namespaces"
    " (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or run as root"
)


def needs_mounts() -> None:
    """Skip the test if mounts in a private namespace are not allowed."""
    reason = find_obstacle()
    if reason is not None:
        skip_for_missing(NO_MOUNTS.format(reason=reason))


def find_obstacle() -> str | None:
    """Return why nothing can be mounted, in one line; None if it can."""
    try:
        tried = subprocess.run(
            [*PROBE, tempfile.gettempdir()], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"unshare: {error.strerror}"
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[0]
