"""Trial of an installation, as a user would do it; it needs no other package.

    python -m tests.installed.smoke agent       an installation with the extra `agent`
    python -m tests.installed.smoke embedded    one with `embedded` and `alerts`

It runs the commands of this Python, so it tries the distribution that is installed there, in a
folder from which the checkout cannot be imported. It ends with status 1 at the first failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.support.dashboard.posts import UPDATE_PATH, ask_page
from tests.support.ports import fixed_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TIMEOUT_S = 300
SPOOL_EXAMPLE = Path(__file__).parents[2] / "docs" / "spool_example.py"
PAGES = ("timeline", "rank", "graph", "links", "mfu", "what-if", "start-up", "runs", "health")

IMPORTS = {
    "agent": ("rankscope.tracer", "rankscope.collector.agent.agent", "rankscope.doctor.host"),
    "embedded": (
        "rankscope.run",
        "rankscope.comparison",
        "rankscope.server.serve",
        "rankscope.dashboard.app",
        "rankscope.collector.http.application",
        "rankscope.collector.notify.apprise_receiver",
        "rankscope.trainer.simulator.simulation",
    ),
}


class Installation:
    """Commands of the installed distribution, with a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RANKSCOPE_") and name != "PYTHONPATH"
        }
        self.environment = {
            **kept,
            "HOME": str(folder),
            "XDG_DATA_HOME": str(folder / "data"),
            "XDG_STATE_HOME": str(folder / "state"),
        }

    def run(self, *arguments: str, status: int | None = 0) -> str:
        """Run a Python command line, which must end with ``status``; return its output.

        Args:
            arguments: Those of Python.
            status: None: any.
        """
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        print(f"{done.returncode}  {' '.join(arguments)[:100]}", flush=True)
        if status not in {done.returncode, None}:
            sys.exit(f"expected status {status}:\n{done.stdout}\n{done.stderr}")
        return done.stdout or done.stderr

    def rankscope(self, *arguments: str, status: int | None = 0) -> str:
        """Run `rankscope` with some arguments."""
        return self.run("-m", "rankscope", *arguments, status=status)

    @contextmanager
    def process(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a subcommand of `rankscope` until the block ends; it must then end by itself."""
        with (self.folder / f"{arguments[0]}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rankscope", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                status = process.wait(TIMEOUT_S)
        print(f"{status}  {' '.join(arguments)[:100]}", flush=True)
        if status:
            sys.exit((self.folder / f"{arguments[0]}.log").read_text())


def fetch(url: str, token: str, posted: Mapping[str, Any] | None = None) -> bytes:
    """Return the body of an answer 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    if posted is not None:
        request.data = json.dumps(posted).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read()
    asked = "" if posted is None else posted["inputs"][0]["value"]
    print(f"{answer.status}  {urlsplit(url).path} {asked}", flush=True)
    return body


def try_agent(installation: Installation) -> None:
    """Import, print the version, examine the host, and let an agent wait for its collector."""
    own = version("rankscope")
    for module in IMPORTS["agent"]:
        installation.run("-c", f"import {module}")
    assert installation.rankscope("--version").strip() == f"rankscope {own}"
    installation.run("-c", f"import rankscope; assert rankscope.__version__ == {own!r}")
    examined = json.loads(installation.rankscope("doctor", "--json", status=None))
    states = {check["check"]: check["state"] for check in examined["checks"]}
    assert states["packages"] == states["extensions"] == "healthy", states
    spool = installation.folder / "spool"
    installation.run(str(SPOOL_EXAMPLE), str(spool))
    url = f"http://127.0.0.1:{fixed_port()}"
    with installation.process("agent", "--spool", str(spool), "--collector", url):
        log = installation.folder / "agent.log"
        wait_until(lambda: url in log.read_text(), timeout_s=TIMEOUT_S)  # its first attempt


def try_without_server(installation: Installation) -> None:
    """Ask the agent's installation for what it does not have: one line says what to install."""
    said = installation.rankscope("runs", status=2)
    assert said.count("\n") == 1, said
    assert 'pip install "rankscope[embedded]"' in said, said


def try_embedded(installation: Installation) -> None:
    """Simulate, analyze, export, serve, and take what an agent sends."""
    for module in IMPORTS["embedded"]:
        installation.run("-c", f"import {module}")
    installation.rankscope("simulate", "slow-link", "--run", "trial", "--ranks", "16")
    report = json.loads(installation.rankscope("analyze", "trial", "--json"))
    assert "slow-link" in {finding["cause"] for finding in report["findings"]}, report
    trace = installation.folder / "trial.json"
    installation.rankscope("export", "trial", "--format", "perfetto", "--out", str(trace))
    assert json.loads(trace.read_text())["traceEvents"]

    spool, port = installation.folder / "spool", fixed_port()
    with installation.process("serve", "--port", str(port)) as server:
        assert server.stdout is not None
        address = urlsplit(server.stdout.readline().split()[-1])
        token = address.query.partition("=")[2]
        url = f"http://127.0.0.1:{port}"
        assert b"rankscope" in fetch(f"{url}/", token)
        for page in ("/run/trial", *(f"/{name}?run=trial" for name in PAGES)):
            fetch(url + UPDATE_PATH, token, ask_page(page))
        assert b"<svg" in fetch(f"{url}/export/report.html?run=trial", token)
        assert b"rankscope_store_up 1.0" in fetch(f"{url}/metrics", token)
        installation.environment["RANKSCOPE_TOKEN"] = token
        with installation.process("agent", "--spool", str(spool), "--collector", url):
            wait_until(
                lambda: '"example"' in installation.rankscope("runs", "--json"),
                timeout_s=TIMEOUT_S,
            )
    installation.environment.pop("RANKSCOPE_TOKEN")


def main() -> None:
    """Try the extra of the command line."""
    (extra,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        installation = Installation(Path(folder))
        try_agent(installation)
        if extra == "agent":
            try_without_server(installation)
        else:
            try_embedded(installation)
    print(f"1 passed, 0 failed: rankscope[{extra}] {version('rankscope')}")


if __name__ == "__main__":
    main()
