"""The JSON document of a report: its keys are a contract with the scripts that read it."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

from .proof_card import ProofCard
from .report import Proof

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .report import Finding, Quality, RunReport

SCHEMA = 1


def to_document(report: RunReport) -> dict[str, Any]:
    """Return what `rankscope analyze --json` prints: JSON types only, null if undefined."""
    waterfall, links, waits = report.waterfall, report.links, report.direct_waits
    device = report.device_time
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
        "culprits": report.culprits and asdict(report.culprits),
        "slowdown_by_step": _text_keys(report.slowdown_by_step),
        "m_w": report.m_w,
        "m_s": report.m_s,
        "findings": [_finding(report, finding) for finding in report.findings],
        # Written out, because `asdict` is slow for 12,288 of them.
        "starved": [
            {
                "rank": entry.rank,
                "wait_ratio": entry.wait_ratio,
                "waits_on": [
                    {"rank": on.rank, "ratio": on.ratio, "link": on.link} for on in entry.waits_on
                ],
            }
            for entry in report.starved
        ],
        "waited_links": {str(number): asdict(link) for number, link in report.waited_links.items()},
        "mfu": report.mfu and {**asdict(report.mfu), "by_step": _text_keys(report.mfu.by_step)},
        "mfu_shape": report.mfu_shape and asdict(report.mfu_shape),
        "startup": {
            "num_steps": len(report.startup_s_by_step),
            "time_s": sum(report.startup_s_by_step.values()),
        },
        "planned_steps": list(report.planned_steps),
        "quality": _quality(report.quality),
        "device_time": device
        and {
            "steps": list(device.steps),
            "mean_s": device.mean_s,
            "file_ratio": device.file_ratio,
            "by_rank_s": {str(rank): device.of_rank(rank) for rank in device.ranks},
        },
        "memory": report.memory and asdict(report.memory),
        "kernels": [asdict(kernel) for kernel in report.kernels],
        "paced": report.paced,
        "bandwidth": [asdict(entry) for entry in report.bandwidth],
        # Without the matrices of waterfall and links, which are for drawing.
        "waterfall": waterfall
        and {
            "mean_ratio": dict(waterfall.mean_ratio),
            "waiting_on": [asdict(entry) for entry in waterfall.waiting_on],
            "bubble": waterfall.bubble and asdict(waterfall.bubble),
        },
        "links": links
        and {
            "num_links": links.num_links,
            "num_slow": links.num_slow,
            "links": [{**asdict(link), "excess_ratio": link.excess_ratio} for link in links.links],
            "totals": [asdict(total) for total in links.totals],
        },
        # As columns: there are thousands of pairs.
        "direct_waits": waits
        and {
            "total_ns": waits.total_ns,
            "rank": waits.rank.tolist(),
            "on_rank": waits.on_rank.tolist(),
            "waiting_ns": waits.waiting_ns.tolist(),
        },
    }


def finding_fields(finding: Finding) -> dict[str, Any]:
    """Return a finding without its proof."""
    document = asdict(replace(finding, proof=None, card=None))
    del document["proof"], document["card"]
    return document


def _finding(report: RunReport, finding: Finding) -> dict[str, Any]:
    """Return a finding; its proof has the place in the timeline, the card and the counterfactual.

    What of these is unknown is null or empty; without any, the proof is null.
    """
    document = finding_fields(finding)
    place = finding.proof and asdict(finding.proof)
    card = finding.card and asdict(finding.card)
    own = report.price_while_shown(finding)
    price = own or report.price(finding)
    unknown = dict.fromkeys((each.name for each in fields(Proof)), None)
    document["proof"] = (
        {
            **(place or unknown),
            **(card or asdict(ProofCard())),
            "counterfactual": price
            and {
                "step_s": price.step_s,
                "fixed_step_s": price.fixed_step_s,
                "since": price.since,
                "steps": own and finding.steps,
            },
        }
        if place or card
        else None
    )
    return document


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


def _text_keys(values: Mapping[int, float | None]) -> dict[str, float | None]:
    return {str(key): value for key, value in values.items()}


def _worker_keys(values: Mapping[tuple[int, int], float | None]) -> dict[str, float | None]:
    return {f"{dp},{stage}": value for (dp, stage), value in values.items()}
