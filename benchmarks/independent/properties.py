"""What must not change a verdict: `python -m benchmarks.independent.properties 1 5 7`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.independent.__main__ import case_by_number, samples_of
from benchmarks.independent.run_one import analyse, clocks_of, lay_out, step_bounds
from benchmarks.independent.spool_bytes import Telling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.independent.cases import Case
    from benchmarks.independent.jobs import Running
    from benchmarks.independent.machine import Rank
    from rankscope.analysis.report.report import RunReport

Told = list[tuple[str, tuple[int, ...], tuple[int, int] | None, float | None, float | None]]

NAMES = {
    "forward": "Modell.vorwärts", "backward": "loss.backward()", "all_reduce": "ncclAllReduce",
    "wait": "cudaStreamWaitEvent", "next batch": "loader", "compute": "stream 7",
}  # fmt: skip


def told(report: RunReport, number_of: Mapping[int, int], first_step: int = 0) -> Told:
    """Return findings with ranks and steps renumbered, in a fixed order."""
    found = [
        (
            each.cause,
            tuple(sorted(number_of.get(rank, rank) for rank in each.ranks)),
            None
            if each.steps is None
            else (each.steps[0] - first_step, each.steps[1] - first_step),
            each.slowdown,
            each.recoverable_ratio,
        )
        for each in report.findings
    ]
    return sorted(found, key=lambda each: (each[0], each[1], each[2] or (0, 0)))


def differences(one: Told, other: Told, tolerance: float) -> str:
    """Return in what two lists differ, "" for nothing."""
    if [each[:3] for each in one] != [each[:3] for each in other]:
        return f"{[each[:3] for each in one]} against {[each[:3] for each in other]}"
    worst = max(
        (abs(a - b) for left, right in zip(one, other, strict=True)
         for a, b in zip(left[3:], right[3:], strict=True) if a is not None and b is not None),
        default=0.0,
    )  # fmt: skip
    return f"a share differs by {worst:.2g}" if worst > tolerance else ""


def check(case: Case, folder: Path) -> dict[str, str]:
    """Run a case as it is and changed; return what each change changed."""
    running, ranks = lay_out(case.job, case.faults)
    telling = Telling(run_id="plain", clocks=clocks_of(case.job, off_ns=0))
    bounds = step_bounds(running, ranks)

    def verdict(
        case: Case, telling: Telling, laid: tuple[Running, list[Rank]] = (running, ranks)
    ) -> RunReport:
        return analyse(
            None, folder, laid[0], laid[1], telling, measured_error_ns=100_000,
            samples=samples_of(case, bounds, factor=telling.time_factor),
        )  # fmt: skip

    plain = told(verdict(case, telling), {})
    changed: dict[str, Callable[[], tuple[Told, float]]] = {
        "row order": lambda: (told(verdict(case, replace(telling, shuffle_seed=1)), {}), 1e-9),
        "names": lambda: (told(verdict(case, replace(telling, names=NAMES)), {}), 1e-9),
        "time x 3": lambda: (told(verdict(case, replace(telling, time_factor=3.0)), {}), 1e-6),
        "time x 0.5": lambda: (told(verdict(case, replace(telling, time_factor=0.5)), {}), 1e-6),
        "steps + 1000": lambda: (
            told(verdict(case, replace(telling, first_step=1000)), {}, 1000), 1e-9,
        ),
        "clocks": lambda: (
            told(verdict(case, replace(telling, clocks=clocks_of(case.job, off_ns=50_000))), {}),
            0.02,
        ),
        "ranks": lambda: (_relabelled(case, folder, verdict), 1e-6),
    }  # fmt: skip
    found = {}
    for name, run in changed.items():
        other, tolerance = run()
        found[name] = differences(plain, other, tolerance)
    return found


def _relabelled(case: Case, folder: Path, verdict: Callable[..., RunReport]) -> Told:
    """Run a case whose ranks are numbered otherwise; hosts and places stay."""
    del folder
    places = case.job.places
    order = np.random.default_rng(case.number).permutation(places.world_size).tolist()
    running, ranks = lay_out(case.job, case.faults)
    number_of = {new: old for old, new in enumerate(order)}
    renumbered = replace(case.job, places=replace(places, order=tuple(order)))
    ids = {
        group_id: group.renumbered(order).group_id
        for groups in running.groups.values()
        for group_id, group in groups.items()
    }
    running.job = renumbered
    running.renumber(order)
    for rank in ranks:
        rank.renumber(order, ids)
    telling = Telling(run_id="ranks", clocks=clocks_of(case.job, off_ns=0))
    mapped = replace(case, job=renumbered, faults=tuple(
        replace(each, ranks=tuple(order[rank] for rank in each.ranks)) for each in case.faults
    ))  # fmt: skip
    return told(verdict(mapped, telling, (running, ranks)), number_of)


def main() -> None:
    """Check the cases whose numbers are given; exit status 1 where anything changed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.independent.properties")
    parser.add_argument("numbers", type=int, nargs="+")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for number in parser.parse_args().numbers:
            case = case_by_number(number)
            for name, difference in check(case, Path(folder)).items():
                failed |= bool(difference)
                sys.stdout.write(f"{number} {case.cause}: {name}: {difference or 'same'}\n")
                sys.stdout.flush()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
