"""Results of checks as rows of the store, and versions compared over its hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count
from rankscope.collector.read.host_checks import WARNING, StoredCheck, check_row
from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankscope.collector.identity import Row

    from .result import Result

NEWEST_NS = 7 * 86_400 * NS_PER_S
"""Age up to which the newest examination of a host counts."""

MIN_HOSTS = 3
"""Hosts of which most must agree: of two that differ, neither is known to be wrong."""


def check_rows(
    results: Iterable[Result],
    *,
    host: str,
    at_ns: int,
    occasion: str,
    run_id: str = "",
    epoch: int = -1,
) -> list[Row]:
    """Return the results of an examination as rows of table ``host_checks``."""
    return [
        check_row(
            StoredCheck(
                host=host,
                at_ns=at_ns,
                occasion=occasion,
                run_id=run_id,
                epoch=epoch,
                section=result.section,
                name=result.check,
                part=result.part,
                device=result.device,
                state=result.state,
                reason=result.reason,
                remedy=result.remedy,
                value=result.value,
            )
        )
        for result in results
    ]


def compare_values(checks: Sequence[StoredCheck]) -> list[StoredCheck]:
    """Return a warning for each host whose newest version is not that of most hosts."""
    by_name: dict[str, list[StoredCheck]] = {}
    for check in checks:
        if check.value:
            by_name.setdefault(check.name, []).append(check)
    found = []
    for alike in by_name.values():
        counted = Counter(check.value for check in alike)
        value, num = counted.most_common(1)[0]
        if len(alike) < MIN_HOSTS or num == len(alike) or 2 * num <= len(alike):
            continue
        found += [
            replace(
                check,
                part="",
                device="",
                value="",
                state=WARNING,
                reason=f"{check.value} here, and {value} on {num} of"
                f" {format_count(len(alike), 'host')}",
                remedy="bring the host to the image of the others",
            )
            for check in alike
            if check.value != value
        ]
    return sorted(found, key=lambda check: (check.host, check.name))
