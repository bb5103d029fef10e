"""The process of a job: started, signalled and ended as its shell would have done it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.job.command import CommandStartError, check_program, run_command, signals_blocked
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def run(*command: str) -> int:
    with signals_blocked() as mask:
        return run_command(command, dict(os.environ), mask=mask, before_stop=lambda: None)


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_status_is_that_of_a_shell(script: str, status: int) -> None:
    plain = subprocess.run(["bash", "-c", f"bash -c '{script}'; exit $?"], check=False)

    assert run("bash", "-c", script) == status == plain.returncode


SUPERVISED = """
import os, sys
from rankscope.job.command import run_command, signals_blocked
os.setpgid(0, 0)
with signals_blocked() as mask:
    status = run_command(
        tuple(sys.argv[1:]), dict(os.environ), mask=mask, before_stop=lambda: None
    )
sys.exit(status)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_from_another_process_reaches_the_job(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'exit 7' {number}; touch {ready}; for i in {{1..6000}}; do sleep 0.01; done"
    # A process of its own: a thread that ran here before would take the signal. Under nohup it
    # would ignore SIGHUP, and so would the job.
    default = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)"

    with subprocess.Popen(
        [sys.executable, "-c", default + SUPERVISED, "bash", "-c", script]
    ) as own:
        wait_until(ready.exists)
        own.send_signal(number)

        assert own.wait(timeout=60) == 7


NOTES_SIGNALS = """
import os, signal, sys
with open(sys.argv[1], "a", buffering=1) as notes:
    for name in ("TERM", "CONT"):
        signal.signal(signal.Signals[f"SIG{name}"], lambda *_, name=name: print(name, file=notes))
    signal.signal(signal.SIGINT, lambda *_: os._exit(9))
    print("ready", file=notes)
    while True:
        signal.pause()
"""


def test_a_signal_to_the_process_group_reaches_the_job_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    job = (sys.executable, "-c", NOTES_SIGNALS, str(notes))

    def has_noted(*names: str) -> bool:
        return notes.exists() and notes.read_text().split() == ["ready", *names]

    with subprocess.Popen([sys.executable, "-c", SUPERVISED, *job]) as process:
        wait_until(has_noted)
        os.killpg(process.pid, signal.SIGTERM)
        wait_until(lambda: has_noted("TERM"))
        # A second SIGTERM would come before: the lowest number is taken first.
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: has_noted("TERM", "CONT"))
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: has_noted("TERM", "CONT", "TERM"))
        process.send_signal(signal.SIGINT)

    assert process.returncode == 9


def test_the_job_blocks_and_ignores_the_signals_that_it_would_without_this_process(
    tmp_path: Path,
) -> None:
    def command(name: str) -> tuple[str, ...]:
        return ("bash", "-c", f"grep -E 'Sig(Blk|Ign)' /proc/self/status > {tmp_path / name}")

    def signals(name: str) -> list[int]:
        lines = (tmp_path / name).read_text().splitlines()
        # Without 32 and 33, which are glibc's own: its posix_spawn ignores them in the child.
        return [int(line.split()[1], 16) & 0x7FFFFFFF for line in lines]

    subprocess.run(command("plain"), check=True)
    run(*command("job"))

    assert signals("job") == signals("plain")


@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("plain", 126)])
def test_a_command_that_cannot_start_has_the_status_of_a_shell(
    tmp_path: Path, program: str, status: int
) -> None:
    (tmp_path / "plain").touch()
    path = str(tmp_path / "plain") if program == "plain" else program

    with pytest.raises(CommandStartError, match=path) as raised:
        check_program(path)

    assert raised.value.status == status
