"""Start of the active tests: in the ranks of a torchrun, or in processes of this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..result import Result, State
from .trials import SECTION, run_tests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..host import Host

MAX_CPU_RANKS = 4
"""Ranks of a host without GPUs: more would only share its processors."""

TIMEOUT_S = 300.0
WORKER = "rankscope.doctor.active.launch"


def run_active(host: Host) -> list[tuple[str, Result]] | None:
    """Return the results of the active tests with the host of each; None on ranks that are not 0.

    Under torchrun this process is one rank of all. Else one is started here for each GPU.
    """
    if find_spec("torch") is None:
        return [(host.name, _failure(State.NOT_APPLICABLE, "torch is not installed"))]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return run_tests(host.name)
    return _run_here(host.name, num_ranks=_num_devices())


def _num_devices() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, min(MAX_CPU_RANKS, os.cpu_count() or 1))


def _run_here(host: str, *, num_ranks: int) -> list[tuple[str, Result]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    processes = [
        subprocess.Popen(  # noqa: S603  # this package
            [sys.executable, "-m", WORKER, host],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    try:
        output, problems = processes[0].communicate(timeout=TIMEOUT_S)
        for process in processes[1:]:
            process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"the tests have not ended after {TIMEOUT_S:.0f} s: a device or a link hangs"
        return [(host, _failure(State.ERROR, text))]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        last = (problems.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
        return [(host, _failure(State.ERROR, f"the tests failed: {last}"))]
    return [
        (of_host, Result(**{**fields, "state": State(fields["state"])}))
        for of_host, fields in json.loads(output)
    ]


def _failure(state: State, reason: str) -> Result:
    remedy = "" if state is State.NOT_APPLICABLE else "see dmesg; run the tests on fewer devices"
    return Result(section=SECTION, check="active-tests", state=state, reason=reason, remedy=remedy)


def main(arguments: Sequence[str]) -> None:
    """Run one rank; rank 0 writes the results to stdout."""
    results = run_tests(arguments[0])
    if results is not None:
        sys.stdout.write(json.dumps([(host, asdict(result)) for host, result in results]))


if __name__ == "__main__":
    main(sys.argv[1:])
