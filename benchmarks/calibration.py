"""Reliability of `confidence` over the labelled sets.

    python -m benchmarks.calibration --simulated FILE.jsonl ... --independent FILE.jsonl ...

Reads results of `benchmarks.diagnosis` and `benchmarks.independent`. A finding is right if a fault
of its run has its cause and its place. Prints the table of docs/diagnosis.md: by confidence, the
share of right findings with its 95 % interval (Wilson's). Then the Brier score, the mean of
``(confidence - right)^2``, beside that of one confidence for all findings; and Platt's scaling
``1 / (1 + exp(-(a + b logit(confidence))))``, the identity if the confidence is calibrated.

Source:
    Platt (1999), Probabilistic outputs for support vector machines; Brier (1950).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import minimize

from benchmarks import diagnosis_summary
from benchmarks.diagnosis_summary import is_right, share_text
from benchmarks.independent import score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.93, 0.95, 0.97, 0.99, 1.0)
"""Narrower where most findings are."""

MOST = 1 - 1e-6
"""A confidence of 1 has no logit."""

Judged = tuple[float, bool]
"""Confidence of a finding, and whether it is right."""


def simulated_findings(results: Iterable[dict[str, Any]]) -> list[Judged]:
    """Return the alarms of simulated runs."""
    return [
        (each["confidence"], is_right(result, each))
        for result in results
        for each in result["findings"]
        if each["cause"] not in diagnosis_summary.NO_ALARM
    ]


def independent_findings(rows: Iterable[dict[str, Any]]) -> list[Judged]:
    """Return the alarms of runs of the independent generator."""
    return [
        (each["confidence"], any(score.fits(each, fault) for fault in row["faults"]))
        for row in rows
        for each in row.get("findings", ())
        if each["cause"] not in score.NO_ALARM
    ]


def brier_score(confidence: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return the mean squared difference of confidence and truth: 0 is perfect."""
    return float(np.mean((confidence - right) ** 2))


def platt_scaling(
    confidence: NDArray[np.float64], right: NDArray[np.float64]
) -> tuple[float, float]:
    """Return (a, b) of the most likely scaling; (0, 1) is the identity."""
    clipped = np.clip(confidence, 1 - MOST, MOST)
    logit = np.log(clipped / (1 - clipped))

    def loss(found: NDArray[np.float64]) -> float:
        scaled = found[0] + found[1] * logit
        return float(
            np.mean(np.logaddexp(0, -scaled) * right + np.logaddexp(0, scaled) * (1 - right))
        )

    a, b = minimize(loss, x0=(0.0, 1.0), method="Nelder-Mead").x
    return float(a), float(b)


def reliability(judged: Sequence[Judged]) -> str:
    """Return the table and the scores."""
    confidence = np.array([each for each, _ in judged])
    right = np.array([float(each) for _, each in judged])
    place = np.clip(np.searchsorted(BINS, confidence, side="right") - 1, 0, len(BINS) - 2)
    lines = ["| confidence | mean | right findings |", "| --- | --- | --- |"]
    for number in range(len(BINS) - 1):
        inside = place == number
        mean = f"{confidence[inside].mean():.3f}" if inside.any() else "-"
        share = share_text(right[inside].astype(bool).tolist())
        lines.append(f"| {BINS[number]:g} to {BINS[number + 1]:g} | {mean} | {share} |")
    base = np.full(len(right), right.mean())
    a, b = platt_scaling(confidence, right)
    lines.append("")
    lines.append(
        f"{len(judged)} findings, {right.mean():.1%} right at a mean confidence of"
        f" {confidence.mean():.3f}. Brier score {brier_score(confidence, right):.4f}, of one"
        f" confidence for all {brier_score(base, right):.4f}. Platt's scaling: a = {a:.2f},"
        f" b = {b:.2f}."
    )
    return "\n".join(lines)


def main() -> None:
    """Print the reliability of results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--simulated", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--independent", type=Path, nargs="*", default=[], metavar="FILE")
    options = parser.parse_args()
    judged = simulated_findings(_rows(options.simulated))
    judged += independent_findings(_rows(options.independent))
    if not judged:
        parser.error("the files have no findings: name results of the benchmarks")
    sys.stdout.write(reliability(judged) + "\n")


def _rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
