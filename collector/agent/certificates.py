"""The agent's side of TLS: whom it believes, and who it says it is, as the files have it now."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..file_change import file_marks
from .errors import AgentConfigError, reason_of

if TYPE_CHECKING:
    from pathlib import Path

    from ..file_change import Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of the agent's side of TLS."""

    ca: Path | None = None
    """Who may sign the collector's certificate; None: whom this machine trusts."""

    certificate: Path | None = None
    """The agent's own, where the collector asks for one."""

    key: Path | None = None


class Certificates:
    """Holds what a new connection needs; renewed files are taken up at the next one.

    An agent lives longer than a certificate. Files that can't be used, such as a pair of which
    one half is renewed, leave what was read before, and are looked at again each time.

    Args:
        files: Where they are.

    Raises:
        AgentConfigError: They can't be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._marks = self._look()
        self._context = _context(files)

    def context(self) -> ssl.SSLContext:
        """Return what to connect with."""
        marks = self._look()
        if marks != self._marks:
            try:
                self._context = _context(self._files)
            except AgentConfigError:
                return self._context
            self._marks = marks
        return self._context

    def _look(self) -> Marks:
        files = self._files
        return file_marks(*(path for path in (files.ca, files.certificate, files.key) if path))


def _context(tls: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.certificate is not None:
            key = None if tls.key is None else str(tls.key)
            context.load_cert_chain(str(tls.certificate), key, password=_no_password)
    except (OSError, ValueError) as error:
        raise AgentConfigError(f"the certificates can't be used: {reason_of(error)}") from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password: give one without, readable by its owner alone")
