"""Invariances of the diagnosis: `python -m benchmarks.independent.properties 1 5 7`."""

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
from benchmarks.independent.spool_bytes import SpoolOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.independent.cases import Case
    from benchmarks.independent.jobs import Running
    from benchmarks.independent.machine import Rank
    from rankscope.analysis.report.report import RunReport

Findings = list[tuple[str, tuple[int, ...], tuple[int, int] | None, float | None, float | None]]

NAMES = {
    "forward": "Modell.vorwärts", "backward": "loss.backward()", "all_reduce": "ncclAllReduce",
    "wait": "cudaStreamWaitEvent", "next batch": "loader", "compute": "stream 7",
}  # fmt: skip


def normalized(report: RunReport, number_of: Mapping[int, int], first_step: int = 0) -> Findings:
    """Return the findings with renumbered ranks and steps, sorted."""
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


def differences(one: Findings, other: Findings, tolerance: float) -> str:
    """Return the differences of two lists; "" if they are equal."""
    if [each[:3] for each in one] != [each[:3] for each in other]:
        return f"{[each[:3] for each in one]} against {[each[:3] for each in other]}"
    worst = max(
        (abs(a - b) for left, right in zip(one, other, strict=True)
         for a, b in zip(left[3:], right[3:], strict=True) if a is not None and b is not None),
        default=0.0,
    )  # fmt: skip
    return f"a share differs by {worst:.2g}" if worst > tolerance else ""


def check(case: Case, folder: Path) -> dict[str, str]:
    """Run a case unchanged and changed, and return the differences."""
    running, ranks = lay_out(case.job, case.faults)
    options = SpoolOptions(run_id="plain", clocks=clocks_of(case.job, off_ns=0))
    bounds = step_bounds(running, ranks)

    def verdict(
        case: Case, options: SpoolOptions, laid: tuple[Running, list[Rank]] = (running, ranks)
    ) -> RunReport:
        return analyse(
            None, folder, laid[0], laid[1], options, measured_error_ns=100_000,
            samples=samples_of(case, bounds, factor=options.time_factor),
        )  # fmt: skip

    plain = normalized(verdict(case, options), {})
    changed: dict[str, Callable[[], tuple[Findings, float]]] = {
        "row order": lambda: (normalized(verdict(case, replace(options, shuffle_seed=1)), {}),
        1e-9), "names": lambda: (normalized(verdict(case, replace(options, names=NAMES)), {}),
        1e-9), "time x 3": lambda: (normalized(verdict(case, replace(options, time_factor=3.0)),
        {}), 1e-6), "time x 0.5": lambda: (normalized(verdict(case, replace(options,
        time_factor=0.5)), {}), 1e-6), "steps + 1000": lambda: (
            normalized(verdict(case, replace(options, first_step=1000)), {}, 1000), 1e-9,
        ),
        "clocks": lambda: (
            normalized(verdict(case, replace(options, clocks=clocks_of(case.job, off_ns=50_000))),
            {}), 0.02,
        ),
        "ranks": lambda: (_relabelled(case, folder, verdict), 1e-6),
    }  # fmt: skip
    found = {}
    for name, run in changed.items():
        other, tolerance = run()
        found[name] = differences(plain, other, tolerance)
    return found


def _relabelled(case: Case, folder: Path, verdict: Callable[..., RunReport]) -> Findings:
    """Run a case with renumbered ranks on the same hosts and positions."""
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
    options = SpoolOptions(run_id="ranks", clocks=clocks_of(case.job, off_ns=0))
    mapped = replace(case, job=renumbered, faults=tuple(
        replace(each, ranks=tuple(order[rank] for rank in each.ranks)) for each in case.faults
    ))  # fmt: skip
    return normalized(verdict(mapped, options, (running, ranks)), number_of)


def main() -> None:
    """Check the cases with the given numbers; exit with 1 if a finding changed."""
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
