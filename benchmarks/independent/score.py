"""Scores of independently generated runs: `python -m benchmarks.independent.score FILE ...`.

Each file has lines of `python -m benchmarks.independent`. A case is right if each of its faults is
reported, the first alarm is that of a fault, and no alarm is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.analysis.causes.order import CAUSES

NO_ALARM = frozenset(
    {
        "healthy",
        "insufficient-evidence",
        *(name for name, each in CAUSES.items() if not each.is_alarm),
    }
)
ANY_MEMBER = frozenset({"slow-link", "launch-skew"})
"""A link is correct by either end, a skew by any rank that launched late."""

MAX_REPORTED = 8
"""Largest number of ranks in the finding of a slow rank: with its partners, if their communication
is not traced."""

MOST = 0.8
"""Share of the ranks of a stage or host that must be reported; at most the rest may be others."""

MAX_LATE_STEPS = 3
WITHOUT_ONSET = frozenset({"", "gc", "skew", "experts"})
"""Intermittent faults, which have no onset."""

Row = dict[str, Any]


def fits(finding: Row, fault: Row) -> bool:
    """Return whether a finding is that of a fault."""
    cause = fault["cause"]
    if finding["cause"] != ("sequence-imbalance" if cause == "unequal-experts" else cause):
        return False
    wanted, reported = set(fault["ranks"]), set(finding["ranks"])
    both = len(wanted & reported)
    if not wanted:
        return True
    if cause in ANY_MEMBER:
        return both > 0
    if cause == "stage-imbalance":
        return both >= MOST * len(wanted) and len(reported - wanted) <= (1 - MOST) * len(wanted)
    if len(wanted) == 1:
        return wanted <= reported and len(reported) <= MAX_REPORTED
    return both >= MOST * len(wanted)


def wrongs_of(row: Row) -> list[str]:
    """Return the errors of a case; none if it is right."""
    if "error" in row:
        return [row["error"].splitlines()[-1]]
    alarms = [each for each in row["findings"] if each["cause"] not in NO_ALARM]
    faults = row["faults"]
    wrongs = [
        f"{fault['cause']} of {fault['ranks'][:MAX_REPORTED]} is not reported"
        for fault in faults
        if not any(fits(alarm, fault) for alarm in alarms)
    ]
    wrongs += [
        f"{alarm['cause']} of {alarm['ranks'][:MAX_REPORTED]} in {alarm['steps']} is reported"
        for alarm in alarms
        if not any(fits(alarm, fault) for fault in faults)
    ]
    if faults and alarms and not any(fits(alarms[0], fault) for fault in faults):
        wrongs.append("and comes first")
    return wrongs


def pairs_of(row: Row) -> list[tuple[Row, Row]]:
    """Return each fault that was reported with the first finding that fits it."""
    found = []
    for fault in row.get("faults", ()):
        fitting = [each for each in row["findings"] if fits(each, fault)]
        if fitting:
            found.append((fault, fitting[0]))
    return found


def onset_errors(rows: list[Row]) -> list[int]:
    """Return the difference in steps of the onset of each finding and its fault."""
    return [
        abs(reported["steps"][0] - fault["first"])
        for row in rows
        for fault, reported in pairs_of(row)
        if fault["how"] not in WITHOUT_ONSET and reported["steps"] is not None
    ]


def slowdown_errors(rows: list[Row]) -> list[float]:
    """Return the relative error of each slowdown whose true value is known from `--truth`."""
    return [
        abs(reported["slowdown"] / row["true_slowdown"] - 1.0)
        for row in rows
        if row.get("true_slowdown")
        for _, reported in pairs_of(row)
        if reported["slowdown"] is not None
    ]


def main() -> None:
    """Print each wrong case, and the number of right ones by class."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.independent.score")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    files = parser.parse_args().files
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for row in rows:
        wrongs = wrongs_of(row)
        right[row["cause"]].append(not wrongs)
        if wrongs:
            sys.stdout.write(
                f"{row['number']} {row['cause']}, {row.get('family')}: {'; '.join(wrongs)}\n"
            )
    for cause, each in sorted(right.items()):
        sys.stdout.write(f"{sum(each):4} of {len(each):4}  {cause}\n")
    total = [one for each in right.values() for one in each]
    sys.stdout.write(f"{sum(total):4} of {len(total):4}  all\n")
    onsets = onset_errors(rows)
    near = sum(error <= MAX_LATE_STEPS for error in onsets)
    sys.stdout.write(f"onset within {MAX_LATE_STEPS} steps: {near} of {len(onsets)}\n")
    errors = slowdown_errors(rows)
    if errors:
        middle, far = np.percentile(errors, (50, 95))
        sys.stdout.write(
            f"slowdown of {len(errors)}: median error {middle:.2%}, p95 {far:.2%},"
            f" largest {max(errors):.1%}\n"
        )


if __name__ == "__main__":
    main()
