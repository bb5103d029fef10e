"""A certificate authority of the moment, and the files that it fills."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import trustme

from rankscope.collector.http.tls import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs what is asked of it into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def issue(
        self, *names: str, file: str = "server", from_day: int = -1, days: int = 9
    ) -> TlsFiles:
        """Return a certificate for ``names``, valid from a day, counted from today."""
        begin = datetime.datetime.now(datetime.UTC) + from_day * DAY
        issued = self._authority.issue_cert(*names, not_before=begin, not_after=begin + days * DAY)
        cert, key = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return TlsFiles(cert=cert, key=key)
