"""Location of a store: its URL, the default URL, and the process that has it open."""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from rankscope.tracer.spool import read_regular_file

from ..errors import StoreUrlError
from ..new_file import new_file

if TYPE_CHECKING:
    from collections.abc import Mapping

STORE_VARIABLE = "RANKSCOPE_STORE"
SERVER_FILE = "server.json"
MAX_SERVER_FILE_BYTES = 1 << 16
ENGINE_FILE = "status"
"""File in which embedded ClickHouse writes its pid, and which it locks."""

SERVER_PARAMETERS = frozenset({"secure", "cluster", "quorum"})
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Names that a cluster and its database may have: both are put into statements unquoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedLocation:
    """A folder that one process at a time may open with embedded ClickHouse."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLocation:
    """A ClickHouse server, or any server of a cluster, reached over HTTP."""

    host: str
    port: int
    user: str
    password: str
    database: str
    secure: bool
    cluster: str | None = None
    """Name of the cluster that has the tables; None: this server alone has them."""

    quorum: int = 1
    """Replicas of a shard that must have a row before it counts as stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFile:
    """The process that serves an embedded store, as it describes itself in `SERVER_FILE`."""

    pid: int
    url: str
    token: str | None


def default_store_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return ``RANKSCOPE_STORE``, or the URL of the embedded store in the user's data folder."""
    chosen = environment.get(STORE_VARIABLE)
    if chosen:
        return chosen
    return f"chdb://{data_folder(environment) / 'store'}"


def data_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's data folder, absolute; it need not exist."""
    data_home = environment.get("XDG_DATA_HOME")
    base = Path(data_home) if data_home else Path.home() / ".local" / "share"
    return base.absolute() / "rankscope"


def parse_store_url(url: str) -> EmbeddedLocation | ServerLocation:
    """Return the location that a store URL names.

    Raises:
        StoreUrlError: Unknown scheme, relative path, no host, a port that is not a number, an
            unknown parameter, or a name that no cluster can have.
    """
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        if parts.netloc or not parts.path.startswith("/"):
            raise StoreUrlError(url, "the path of an embedded store must be absolute")
        return EmbeddedLocation(path=Path(unquote(parts.path)))
    if parts.scheme == "clickhouse":
        return _server_location(url)
    if not parts.scheme:
        raise StoreUrlError(
            url, f"no scheme; an embedded store there is chdb://{Path(url).absolute()}"
        )
    raise StoreUrlError(url, f"unknown scheme {parts.scheme!r}")


def _server_location(url: str) -> ServerLocation:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise StoreUrlError(printable_url(url), "the port is not a number") from None
    if not parts.hostname:
        raise StoreUrlError(printable_url(url), "no host")
    asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(asked.keys() - SERVER_PARAMETERS)
    if unknown:  # a misspelt "cluster" would silently create tables on one server
        raise StoreUrlError(printable_url(url), f"unknown parameter {unknown[0]!r}")
    quorum = asked.get("quorum", "1")
    if not (quorum.isascii() and quorum.isdigit() and int(quorum) > 0):
        raise StoreUrlError(printable_url(url), f"quorum {quorum!r} is not a number of at least 1")
    secure = asked.get("secure", "0") in {"1", "true"}
    location = ServerLocation(
        host=parts.hostname,
        port=port or (8443 if secure else 8123),
        user=unquote(parts.username or "default"),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.strip("/")) or "default",
        secure=secure,
        cluster=asked.get("cluster"),
        quorum=int(quorum),
    )
    _check_cluster(url, location)
    return location


def _check_cluster(url: str, location: ServerLocation) -> None:
    if location.cluster is None:
        if location.quorum > 1:
            raise StoreUrlError(printable_url(url), "a quorum needs a cluster")
        return
    for what, name in (("cluster", location.cluster), ("database", location.database)):
        if not IDENTIFIER.fullmatch(name):
            raise StoreUrlError(
                printable_url(url),
                f"{what} {name!r} may have letters, digits and '_' only",
            )


def printable_url(url: str) -> str:
    """Return the URL without its password, for messages."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    account, _, host = parts.netloc.rpartition("@")
    user = account.partition(":")[0]
    return parts._replace(netloc=f"{user}@{host}").geturl()


def write_server_file(store_path: Path, *, url: str, token: str | None = None) -> Path:
    """Write the file that says that this process serves an embedded store.

    Only its owner may read it. It appears whole: a reader never sees half of it.

    Args:
        token: Token that the server accepts.

    Raises:
        OSError: The file cannot be written, for instance because the disk is full.
    """
    target = store_path / SERVER_FILE
    document = json.dumps({"pid": os.getpid(), "url": url, "token": token})
    with new_file(target, mode=0o600) as file:
        file.write(document.encode())
    return target


def read_server_file(store_path: Path) -> ServerFile | None:
    """Return the process that serves the store; None if no file names one that is alive."""
    try:
        document = json.loads(
            read_regular_file(store_path / SERVER_FILE, max_bytes=MAX_SERVER_FILE_BYTES)
        )
        server = ServerFile(
            pid=int(document["pid"]), url=str(document["url"]), token=document.get("token")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return server if _is_alive(server.pid) else None


def remove_server_file(store_path: Path) -> None:
    """Remove the file of `write_server_file`, if it exists."""
    (store_path / SERVER_FILE).unlink(missing_ok=True)


def is_held_elsewhere(store_path: Path) -> bool:
    """Return whether another process has this folder open with the embedded engine.

    Check before connecting: the engine prints lines of its own to stderr if the lock is taken.
    """
    try:
        descriptor = os.open(store_path / ENGINE_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return engine_holder(store_path) != os.getpid()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def engine_holder(store_path: Path) -> int | None:
    """Return the pid in the engine's lock file; None if there is none."""
    try:
        first = (store_path / ENGINE_FILE).read_text(encoding="utf-8").splitlines()[0]
        return int(first.removeprefix("PID: "))
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
