"""Group tests of 48 hosts as processes, none, one or two of which are slow.

    python -m benchmarks.group_tests [ROUNDS]

Each host is a process that holds a token for some milliseconds; the times are measured, with the
noise of this machine. Prints how often exactly the slow hosts were accused, how often the slow ones
were among those that are "not unique", and how often an innocent host was accused.
"""

from __future__ import annotations

import random
import sys
import time

from rankscope.doctor.active.trials import group_outcomes
from rankscope.doctor.result import State
from tests.support.rankscope.paced_hosts import PacedHosts

NUM_HOSTS = 48
NUM_ROUNDS = 20


def measure(slow: set[int]) -> tuple[set[int], set[int]]:
    """Return the hosts that are accused, and those that are not unique."""
    world = PacedHosts(NUM_HOSTS, slow)
    try:
        found = [*group_outcomes(world)]
    finally:
        world.close()
    accused, unclear = (
        {world.hosts.index(host) for host, _, outcome in found if outcome.state is state}
        for state in (State.ERROR, State.WARNING)
    )
    return accused, unclear


def main(arguments: list[str]) -> None:
    """Print one line for each number of slow hosts."""
    num_rounds = int(arguments[0]) if arguments else NUM_ROUNDS
    draws = random.Random(7)
    for num_slow in (0, 1, 2):
        begun_s = time.monotonic()
        exact = not_unique = innocent = 0
        for _ in range(num_rounds):
            slow = set(draws.sample(range(NUM_HOSTS), num_slow))
            accused, unclear = measure(slow)
            exact += accused == slow and not unclear
            not_unique += bool(unclear) and slow <= accused | unclear
            innocent += bool(accused - slow)
        took_s = (time.monotonic() - begun_s) / num_rounds
        sys.stdout.write(
            f"{num_slow} of {NUM_HOSTS} slow, {num_rounds} times: {exact} exactly named,"
            f" {not_unique} not unique, {innocent} accuse an innocent host; {took_s:.2f} s each\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
