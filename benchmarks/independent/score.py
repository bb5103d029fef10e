"""Say how many cases were told rightly: `python -m benchmarks.independent.score FILE ...`.

Each file holds lines that `python -m benchmarks.independent` wrote. A case is right where each of
its faults is told, an alarm that fits a fault comes first, and no alarm fits none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

NO_ALARM = frozenset({"healthy", "checkpoint", "layout", "insufficient-evidence"})
ANY_MEMBER = frozenset({"slow-link", "launch-skew"})
"""A link is told by either end; skew by whoever launched late."""

MAX_TOLD = 8
"""A slow rank may stand among so many: its partners, where their communication is not traced."""

MOST = 0.8
"""Of a stage or a host so many of its ranks must be told, and of a stage so many others not."""

MAX_LATE_STEPS = 3
WITHOUT_ONSET = frozenset({"", "gc", "skew", "experts"})
"""Faults that come and go: they have no one step of onset."""

Row = dict[str, Any]


def fits(finding: Row, fault: Row) -> bool:
    """Tell whether a finding is that fault."""
    cause = fault["cause"]
    if finding["cause"] != ("sequence-imbalance" if cause == "unequal-experts" else cause):
        return False
    wanted, told = set(fault["ranks"]), set(finding["ranks"])
    both = len(wanted & told)
    if not wanted:
        return True
    if cause in ANY_MEMBER:
        return both > 0
    if cause == "stage-imbalance":
        return both >= MOST * len(wanted) and len(told - wanted) <= (1 - MOST) * len(wanted)
    if len(wanted) == 1:
        return wanted <= told and len(told) <= MAX_TOLD
    return both >= MOST * len(wanted)


def wrongs_of(row: Row) -> list[str]:
    """Return what is wrong with a case; nothing where it is right."""
    if "error" in row:
        return [row["error"].splitlines()[-1]]
    alarms = [each for each in row["findings"] if each["cause"] not in NO_ALARM]
    faults = row["faults"]
    wrongs = [
        f"{fault['cause']} of {fault['ranks'][:MAX_TOLD]} is not told"
        for fault in faults
        if not any(fits(alarm, fault) for alarm in alarms)
    ]
    wrongs += [
        f"{alarm['cause']} of {alarm['ranks'][:MAX_TOLD]} in {alarm['steps']} is told"
        for alarm in alarms
        if not any(fits(alarm, fault) for fault in faults)
    ]
    if faults and alarms and not any(fits(alarms[0], fault) for fault in faults):
        wrongs.append("and comes first")
    return wrongs


def pairs_of(row: Row) -> list[tuple[Row, Row]]:
    """Return each fault that was told with the first finding that fits it."""
    found = []
    for fault in row.get("faults", ()):
        fitting = [each for each in row["findings"] if fits(each, fault)]
        if fitting:
            found.append((fault, fitting[0]))
    return found


def onset_errors(rows: list[Row]) -> list[int]:
    """Return by how many steps each finding's begin misses its fault's, where it has one."""
    return [
        abs(told["steps"][0] - fault["first"])
        for row in rows
        for fault, told in pairs_of(row)
        if fault["how"] not in WITHOUT_ONSET and told["steps"] is not None
    ]


def slowdown_errors(rows: list[Row]) -> list[float]:
    """Return the relative error of each estimated slowdown that `--truth` gave the true one of."""
    return [
        abs(told["slowdown"] / row["true_slowdown"] - 1.0)
        for row in rows
        if row.get("true_slowdown")
        for _, told in pairs_of(row)
        if told["slowdown"] is not None
    ]


def main() -> None:
    """Print each wrong case, and how many are right by class."""
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
