"""Commands of `rankscope`, one after another in one process.

``python -m tests.faults.many_commands`` reads the arguments of each as a line of JSON, and answers
with its status, stdout and stderr.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from rankscope.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Run = Callable[..., tuple[int, str, str]]


@contextmanager
def commands(environment: Mapping[str, str]) -> Iterator[Run]:
    """Return a function that runs one command and returns its status, stdout and stderr."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pipes = process.stdin, process.stdout

        def run(*arguments: str) -> tuple[int, str, str]:
            asked, answered = pipes
            assert asked is not None
            assert answered is not None
            asked.write(json.dumps(arguments) + "\n")
            asked.flush()
            line = answered.readline()
            assert line, f"the process of {arguments} died"
            status, out, err = json.loads(line)
            return status, out, err

        yield run


def _run(arguments: list[str]) -> tuple[int, str, str]:
    sys.argv = ["rankscope", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main()
        except Exception:  # noqa: BLE001 -- as the interpreter reports it
            traceback.print_exc()
            status = 1
    return status, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    for asked_line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(asked_line))) + "\n")
        sys.stdout.flush()
