"""Group tests of 48 hosts as processes, up to three of which are slow, or two only together.

    python -m benchmarks.group_tests [ROUNDS]

Each host is a process that holds a token for some milliseconds; the times are measured, with the
noise of this machine. Prints how often exactly the slow hosts were accused, how often the slow ones
were among those that are "not unique", and how often an innocent host was accused. Of two hosts
with a bad connection, none is to be accused; exact is a warning that names both.
"""

from __future__ import annotations

import random
import sys
import time

from rankscope.doctor.active.trials import group_outcomes
from rankscope.doctor.group_test import plan_rounds
from rankscope.doctor.result import State
from tests.support.rankscope.paced_hosts import PacedHosts

NUM_HOSTS = 48
NUM_ROUNDS = 20


def measure(slow: set[int], *, bad_pair: set[int]) -> tuple[set[int], set[int], str]:
    """Return the hosts that are accused, those that are not unique, and the warnings."""
    world = PacedHosts(NUM_HOSTS, slow, bad_pair=bad_pair)
    try:
        found = [*group_outcomes(world)]
    finally:
        world.close()
    accused, unclear = (
        {world.hosts.index(host) for host, _, outcome in found if outcome.state is state}
        for state in (State.ERROR, State.WARNING)
    )
    warnings = "; ".join(out.reason for _, _, out in found if out.state is State.WARNING)
    return accused, unclear, warnings


def draw_pair(draws: random.Random) -> set[int]:
    """Return two hosts that are in one group."""
    groups = [group for of_round in plan_rounds(NUM_HOSTS) for group in of_round]
    return set(draws.sample(draws.choice(groups), 2))


def main(arguments: list[str]) -> None:
    """Print one line for each number of slow hosts."""
    num_rounds = int(arguments[0]) if arguments else NUM_ROUNDS
    draws = random.Random(7)
    for num_slow, num_paired in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 2)):
        begun_s = time.monotonic()
        exact = not_unique = innocent = 0
        for _ in range(num_rounds):
            slow = set(draws.sample(range(NUM_HOSTS), num_slow))
            pair = draw_pair(draws) if num_paired else set()
            accused, unclear, warnings = measure(slow, bad_pair=pair)
            if pair:
                exact += not accused and all(f"n{host:02}" in warnings for host in pair)
            else:
                exact += accused == slow and not unclear
                not_unique += bool(unclear) and slow <= accused | unclear
            innocent += bool(accused - slow)
        took_s = (time.monotonic() - begun_s) / num_rounds
        sys.stdout.write(
            f"{num_slow or num_paired} of {NUM_HOSTS} slow{' only together' * bool(num_paired)},"
            f" {num_rounds} times: {exact} exactly named,"
            f" {not_unique} not unique, {innocent} accuse an innocent host; {took_s:.2f} s each\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
