"""Programs as processes: a command until its end, and a server for a block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from tests.support.paths import PYTHON_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "rankscope")
TIMEOUT_S = 120.0


def environment(store: Path, **more: str) -> dict[str, str]:
    """Return this process's environment with another store, and no token, webhook or trace."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    own = {
        "RANKSCOPE_STORE": f"chdb://{store}",
        "RANKSCOPE_TOKENS": f"{store}-tokens.json",
        "XDG_STATE_HOME": f"{store}-state",
    }
    return {**kept, **own, **more}


def job_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a job that this checkout traces, with its data in a folder."""
    own = {
        "PYTHONPATH": PYTHON_PATH,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_DATA_HOME": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
    }
    return environment(folder / "store", **own, **more)


def rankscope(
    *arguments: str, store: Path, timeout_s: float = TIMEOUT_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(store, **more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass(frozen=True)
class Server:
    """A running `rankscope serve`."""

    process: subprocess.Popen[str]
    part: str
    """Address that it prints."""

    url: str
    token: str

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


@contextmanager
def serving(*arguments: str, store: Path, **more: str) -> Iterator[Server]:
    """Serve ``store`` until the block ends, then terminate the server and wait for it."""
    # A background job of a shell ignores SIGINT, and so would every program started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*COMMAND, "serve", *arguments],
        env=environment(store, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError(f"the server ended: {process.stderr.read()}")
        address = urlsplit(line.split()[-1])
        (token,) = parse_qs(address.query)["token"]
        part = line.partition(":")[0]
        yield Server(process=process, part=part, url=f"http://{address.netloc}", token=token)
    finally:
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert "Traceback (most recent call last)" not in err, err
