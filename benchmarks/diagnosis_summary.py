"""Scores of `benchmarks.diagnosis` as Markdown tables.

A fault of 10 % or more must be found; a smaller one may be. A fault is *located* if a finding names
a culprit, and only ranks that the trace cannot distinguish from culprits (with TP collapsed, their
partners). Top-1: the first finding locates a fault. Exact set: each finding with ranks locates a
fault, and each fault is located. Causes are scored as sets, one F1 per cause. Intervals are 95 %,
Wilson's for shares and by bootstrap for the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.intervals import bootstrap_interval, quantile_interval, share_interval
from rankscope.analysis.causes.order import CAUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Result = dict[str, Any]

DUE_STRENGTH = 1.1
NO_ALARM = frozenset(
    {
        "healthy",
        "insufficient-evidence",
        *(name for name, each in CAUSES.items() if not each.is_alarm),
    }
)
LOCATED = frozenset(
    {"slow-compute", "clock-throttle", "slow-link", "host-stall", "data-stall", "stage-imbalance",
     "launch-skew", "misconfiguration", "crash", "hang"}
)  # fmt: skip
"""Causes with a place."""

ALWAYS_DUE = frozenset(
    {"gc-pause", "launch-skew", "sequence-imbalance", "misconfiguration", "crash", "hang", "layout"}
)
"""Causes whose strength does not follow from that of the scenario."""

BY_NOISE = frozenset(
    {"slow-compute", "clock-throttle", "slow-link", "network-degradation", "host-stall",
     "data-stall", "stage-imbalance", "launch-skew", "gc-pause", "sequence-imbalance"}
)  # fmt: skip
"""Causes whose confidence measures their distance from noise."""

CONFIDENCES = (0.5, 0.75, 0.9, 0.93, 0.95, 0.97, 0.99)

SIZES = ("small", "2048", "12288")
ONSET_STEPS = 3
PAIR = 2
"""A slow adapter of a rank with one inter-host link cannot be distinguished from that link: naming
both ends is correct."""


def summary(results: Sequence[Result]) -> str:
    """Return all tables."""
    parts = [
        _overview(results),
        _by_strength(results),
        _by_cause(results),
        _confusion(results),
        _calibration(results),
    ]
    return "\n\n".join(parts)


def _due(result: Result, label: Result, place: int) -> bool:
    strength = result["strength"] if place == 0 else max(result["strength"], 1.2)
    return label["cause"] in ALWAYS_DUE or strength >= DUE_STRENGTH


def _alarms(result: Result) -> list[Result]:
    return [finding for finding in result["findings"] if finding["cause"] not in NO_ALARM]


def _reported(result: Result) -> list[Result]:
    """Return the alarms, and findings of a fault of the scenario that is no alarm: its layout."""
    planted = {label["cause"] for label in result["truth"]}
    return [
        finding
        for finding in result["findings"]
        if finding["cause"] not in NO_ALARM or finding["cause"] in planted
    ]


def _names(finding: Result, label: Result) -> bool:
    """Return whether a finding locates a fault."""
    named, visible = set(finding["ranks"]), set(label["visible_ranks"])
    if label["cause"] == "slow-link" and len(named) == PAIR:
        return bool(named & set(label["ranks"]))
    return bool(named & set(label["ranks"])) and named <= visible


def _located_due(result: Result) -> list[Result]:
    return [
        label
        for place, label in enumerate(result["truth"])
        if label["cause"] in LOCATED and label["ranks"] and _due(result, label, place)
    ]


def wrongs_of_scenario(result: Result) -> int:
    """Return the number of errors of a scenario.

    A due fault that no finding of its cause locates is one, and so is a finding that no fault has
    caused.
    """
    due = sum(_due(result, label, place) for place, label in enumerate(result["truth"]))
    missed = due - len(_matched(result))
    return missed + sum(not is_right(result, finding) for finding in _alarms(result))


def is_right(result: Result, finding: Result) -> bool:
    """Return whether a fault of the scenario has the cause of a finding, and its place."""
    return any(
        label["cause"] == finding["cause"]
        and (not label["ranks"] or not finding["ranks"] or _names(finding, label))
        for label in result["truth"]
    )


def _top1(result: Result) -> bool | None:
    """Return whether the first finding locates a fault; None if no fault must be found."""
    due = _located_due(result)
    if not due or len(due) < len(result["truth"]):
        return None
    alarms = _alarms(result)
    return bool(alarms) and any(_names(alarms[0], label) for label in due)


def _exact(result: Result) -> bool | None:
    if _top1(result) is None:
        return None
    alarms = [finding for finding in _alarms(result) if finding["ranks"]]
    return all(
        any(_names(finding, label) for label in result["truth"]) for finding in alarms
    ) and all(any(_names(finding, label) for finding in alarms) for label in result["truth"])


def _false_alarm(result: Result) -> bool:
    return bool(_alarms(result))


def _matched(result: Result) -> list[tuple[Result, Result]]:
    """Return pairs (label, finding) with equal cause and place."""
    pairs = []
    for place, label in enumerate(result["truth"]):
        if not _due(result, label, place):
            continue
        for finding in _reported(result):
            same = finding["cause"] == label["cause"]
            if same and (not label["ranks"] or _names(finding, label)):
                pairs.append((label, finding))
                break
    return pairs


def _onset_errors(results: Iterable[Result]) -> list[int]:
    return [
        abs(finding["steps"][0] - label["steps"][0])
        for result in results
        for label, finding in _matched(result)
        if finding["steps"] is not None and label["cause"] not in ("gc-pause", "misconfiguration")
    ]


def _slowdown_errors(results: Iterable[Result]) -> list[float]:
    errors = []
    for result in results:
        matched = _matched(result)
        if "true_slowdown" in result and matched and matched[0][1]["slowdown"] is not None:
            errors.append(abs(matched[0][1]["slowdown"] / result["true_slowdown"] - 1.0))
    return errors


def _early(result: Result) -> bool | None:
    """Return whether the verdict was correct three steps after the onset; None if not measured."""
    if "early_findings" not in result or not _due(result, result["truth"][0], 0):
        return None
    label = result["truth"][0]
    return any(
        finding["cause"] == label["cause"] and _names(finding, label)
        for finding in result["early_findings"]
    )


def _f1_by_cause(results: Sequence[Result]) -> dict[str, tuple[float, int]]:
    """Return (F1, number of faults) of each cause; faults below 10 % are not counted."""
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for result in results:
        due = {t["cause"] for k, t in enumerate(result["truth"]) if _due(result, t, k)}
        may = {label["cause"] for label in result["truth"]}
        reported = {finding["cause"] for finding in _reported(result)}
        right.update(due & reported)
        missed.update(due - reported)
        wrong.update(reported - may)
    causes = sorted(set(right) | set(missed))
    return {
        cause: (
            2 * right[cause] / max(2 * right[cause] + wrong[cause] + missed[cause], 1),
            right[cause] + missed[cause],
        )
        for cause in causes
    }


def _macro_f1(results: Sequence[Result]) -> float:
    values = [value for value, _ in _f1_by_cause(results).values()]
    return float(np.mean(values)) if values else float("nan")


def share_text(values: Iterable[bool | None]) -> str:
    """Return a share of the known values with Wilson's 95 % interval, as text."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    num, hits = len(known), sum(known)
    low, high = share_interval(hits, num)
    return f"{hits / num:.1%} ({low:.1%} - {high:.1%}), {hits} of {num}"


def _quantile_text(values: Sequence[float], quantile: float) -> str:
    if not values:
        return "-"
    low, high = quantile_interval(values, quantile)
    return f"{np.quantile(values, quantile):.2%} ({low:.2%} - {high:.2%}), n = {len(values)}"


def _f1_text(results: Sequence[Result]) -> str:
    if not results:
        return "-"
    low, high = bootstrap_interval(
        np.arange(len(results)),
        lambda chosen: _macro_f1([results[at] for at in chosen.tolist()]),
        num_resamples=200,
    )
    return f"{_macro_f1(results):.3f} ({low:.3f} - {high:.3f})"


def _overview(results: Sequence[Result]) -> str:
    of_size = {size: [r for r in results if r["size"] == size] for size in SIZES}
    of_size = {size: rows for size, rows in of_size.items() if rows}
    of_size["all"] = list(results)
    rows: list[tuple[str, list[str]]] = []

    def line(name: str, value: Callable[[list[Result]], str]) -> None:
        rows.append((name, [value(found) for found in of_size.values()]))

    line("scenarios with faults", lambda found: str(sum(not r["healthy"] for r in found)))
    line("healthy", lambda found: str(sum(r["healthy"] for r in found)))
    line("top-1, faults of 10 % and more", lambda found: share_text(map(_top1, _sick(found))))
    line("exact set of ranks", lambda found: share_text(map(_exact, _sick(found))))
    line("macro-F1 of the cause", _f1_text)
    line("false alarms", lambda found: share_text(_false_alarm(r) for r in found if r["healthy"]))
    line(
        f"onset within {ONSET_STEPS} steps",
        lambda found: share_text(error <= ONSET_STEPS for error in _onset_errors(found)),
    )
    line("slowdown error, median", lambda found: _quantile_text(_slowdown_errors(found), 0.5))
    line("slowdown error, p95", lambda found: _quantile_text(_slowdown_errors(found), 0.95))
    line(
        "verdict within 3 steps of the onset",
        lambda found: share_text(map(_early, _sick(found))),
    )
    line(
        "analysis, us a span, median",
        lambda found: f"{np.median([r['analyze_s'] / r['num_spans'] * 1e6 for r in found]):.1f}",
    )
    return _table(["", *of_size], [[name, *values] for name, values in rows])


def _sick(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if not result["healthy"]]


def _by_strength(results: Sequence[Result]) -> str:
    rows = []
    for strength in sorted({r["strength"] for r in _sick(results)}):
        found = [
            r
            for r in _sick(results)
            if r["strength"] == strength
            and r["truth"]
            and r["truth"][0]["cause"] in LOCATED - ALWAYS_DUE
        ]
        hit = [
            any(
                _names(finding, r["truth"][0]) and finding["cause"] == r["truth"][0]["cause"]
                for finding in _alarms(r)
            )
            for r in found
        ]
        rows.append([f"{strength:g}", share_text(hit)])
    return _table(["factor of the first fault", "named with its cause"], rows)


def _by_cause(results: Sequence[Result]) -> str:
    located: dict[str, list[bool]] = defaultdict(list)
    for result in _sick(results):
        for place, label in enumerate(result["truth"]):
            if label["ranks"] and label["cause"] in LOCATED and _due(result, label, place):
                located[label["cause"]].append(
                    any(_names(finding, label) for finding in _alarms(result))
                )
    rows = [
        [cause, str(num), f"{value:.3f}", share_text(located[cause]) if located[cause] else "-"]
        for cause, (value, num) in _f1_by_cause(results).items()
    ]
    return _table(["cause", "faults of 10 % or more", "F1", "its ranks named"], rows)


def _confusion(results: Sequence[Result]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        if result["healthy"]:
            label = "healthy"
        elif len(result["truth"]) == 1 and _due(result, result["truth"][0], 0):
            label = result["truth"][0]["cause"]
        else:
            continue
        found = (_reported(result) or result["findings"])[0]["cause"]
        counts[label][found] += 1
    columns = sorted({found for row in counts.values() for found in row})
    rows = [
        [label, *(str(counts[label][found] or "") for found in columns)] for label in sorted(counts)
    ]
    return _table(["one fault \\ first finding", *columns], rows)


def _calibration(results: Sequence[Result]) -> str:
    """Return the table of correct findings by confidence."""
    by_place: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for result in results:
        for finding in _alarms(result):
            if finding["cause"] not in BY_NOISE:
                continue
            right = is_right(result, finding)
            place = int(np.searchsorted(CONFIDENCES, finding["confidence"], side="right"))
            by_place[place].append((finding["confidence"], right))
    rows = []
    for place, found in sorted(by_place.items()):
        low = CONFIDENCES[place - 1] if place else 0.0
        mean = float(np.mean([confidence for confidence, _ in found]))
        rows.append([f"{low} and more", f"{mean:.3f}", share_text(right for _, right in found)])
    return _table(["confidence", "mean", "findings that are right"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
