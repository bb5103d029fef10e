"""The JSON document of a report; its keys are fixed by design.md, section 6."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .report import Quality, RunReport, Starved, WaterfallSummary

SCHEMA = 1


def to_document(report: RunReport) -> dict[str, Any]:
    """Return what `rankscope analyze --json` prints: JSON types only, null if undefined."""
    return {
        "schema": SCHEMA,
        "run": report.run,
        "source_format": report.source_format,
        "epochs": list(report.epochs),
        "world_size": report.world_size,
        "layout": report.layout.to_dict(),
        "steps": list(report.steps),
        "num_spans": report.num_spans,
        "step_time_s": asdict(report.step_time_s),
        "launch_slowdown": report.launch_slowdown,
        "replay_error_ratio": report.replay_error_ratio,
        "slowdown": report.slowdown,
        "waste_ratio": report.waste_ratio,
        "slowdown_by_kind": dict(report.slowdown_by_kind),
        "slowdown_by_dp": _text_keys(report.slowdown_by_dp),
        "slowdown_by_stage": _text_keys(report.slowdown_by_stage),
        "slowdown_by_worker": _worker_keys(report.slowdown_by_worker),
        "exact_slowdown_by_worker": _worker_keys(report.exact_slowdown_by_worker),
        "culprits": None if report.culprits is None else asdict(report.culprits),
        "slowdown_by_step": _text_keys(report.slowdown_by_step),
        "m_w": report.m_w,
        "m_s": report.m_s,
        "findings": [asdict(finding) for finding in report.findings],
        "starved": [_starved(entry) for entry in report.starved],
        "mfu": None
        if report.mfu is None
        else {**asdict(report.mfu), "by_step": _text_keys(report.mfu.by_step)},
        "mfu_shape": None if report.mfu_shape is None else asdict(report.mfu_shape),
        "planned_steps": list(report.planned_steps),
        "quality": _quality(report.quality),
        "paced": report.paced,
        "bandwidth": [asdict(entry) for entry in report.bandwidth],
        "waterfall": None if report.waterfall is None else _waterfall(report.waterfall),
    }


def _quality(quality: Quality) -> dict[str, Any]:
    account = quality.account
    return {
        "produced_spans": account.produced,
        "stored_spans": account.stored,
        "dropped_spans": account.num_dropped,
        "buffered_spans": account.buffered,
        "dropped_by_reason": dict(account.dropped),
        "by_rank": [
            {
                "epoch": epoch,
                "rank": rank,
                "produced": of_rank.produced,
                "stored": of_rank.stored,
                "dropped": dict(of_rank.dropped),
                "buffered": of_rank.buffered,
            }
            for (epoch, rank), of_rank in quality.account_by_rank.items()
            if rank != NONE
        ],
        "clock_error_ns": quality.clock_error_ns,
        "coverage_ratio": quality.coverage_ratio,
        "warnings": list(quality.warnings),
    }


def _starved(entry: Starved) -> dict[str, Any]:
    """Return an entry; written out, because `asdict` is slow for 12,288 of them."""
    return {
        "rank": entry.rank,
        "wait_ratio": entry.wait_ratio,
        "waits_on": [{"rank": each.rank, "ratio": each.ratio} for each in entry.waits_on],
    }


def _waterfall(waterfall: WaterfallSummary) -> dict[str, Any]:
    """Return the waterfall without its matrices, which are for drawing."""
    return {
        "mean_ratio": dict(waterfall.mean_ratio),
        "waiting_on": [asdict(entry) for entry in waterfall.waiting_on],
        "bubble": None if waterfall.bubble is None else asdict(waterfall.bubble),
    }


def _text_keys(values: Mapping[int, float | None]) -> dict[str, float | None]:
    return {str(key): value for key, value in values.items()}


def _worker_keys(values: Mapping[tuple[int, int], float | None]) -> dict[str, float | None]:
    return {f"{dp},{stage}": value for (dp, stage), value in values.items()}
