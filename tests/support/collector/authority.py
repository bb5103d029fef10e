"""Temporary certificate authority that writes certificates into files."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import trustme

from rankscope.collector.http.tls import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

DAY = datetime.timedelta(days=1)


class Authority:
    """Certificate authority that issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def issue(
        self, *names: str, file: str = "server", from_day: int = -1, days: int = 9
    ) -> TlsFiles:
        """Return the files of a certificate for ``names``; its first day is relative to today."""
        begin = datetime.datetime.now(datetime.UTC) + from_day * DAY
        issued = self._authority.issue_cert(*names, not_before=begin, not_after=begin + days * DAY)
        cert, key = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return TlsFiles(cert=cert, key=key)
