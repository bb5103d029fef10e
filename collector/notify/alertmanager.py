"""An alert as Prometheus' Alertmanager takes it: a list of labelled alerts.

Source: Alertmanager's API, version 2, ``POST /api/v2/alerts`` (``postableAlerts``).
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALERTS_PATH = "/api/v2/alerts"
"""A webhook whose path ends so is an Alertmanager's."""


def is_alertmanager(url: str) -> bool:
    """Return whether what listens at ``url`` takes alerts in Alertmanager's form."""
    return urlsplit(url).path.rstrip("/").endswith(ALERTS_PATH)


def alertmanager_alerts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an alert document as the body of ``POST /api/v2/alerts``.

    Its labels tell one alert from another: rule, run and first step, as in the store. It
    carries no end, so it stands for Alertmanager's ``resolve_timeout``.

    Args:
        document: As `rankscope.server.alerting.alert_document` writes it.
    """
    finding = document["finding"]
    first_step, last_step = document["steps"]
    return [
        {
            "labels": {
                "alertname": document["rule"],
                "run": document["run"],
                "first_step": str(first_step),
                "cause": finding["cause"],
                "severity": "warning",
            },
            "annotations": {
                "summary": document["text"],
                "steps": f"{first_step}-{last_step}",
                "ranks": _ranges(finding["ranks"]),
                "evidence": finding["evidence"],
            },
            "generatorURL": document["url"],
        }
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ``0, 4-7, 9``: a stage of a large job has thousands of them."""
    apart = groupby(enumerate(ranks), key=lambda each: each[1] - each[0])
    runs = [[str(rank) for _, rank in own] for _, own in apart]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else run for run in runs]  # noqa: PLR2004
    return ", ".join(chain.from_iterable(parts))
