"""Metrics of the server for Prometheus, at `/metrics`.

No label is a rank, host or client: their number is unbounded, and Prometheus keeps a series for
each value of a label. Of runs, only the live ones have gauges, and a bounded number of them.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .gate import API_PREFIX, OPEN_PREFIXES, ROUTE_RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from .requests import AsgiApp, Message, Receive, Scope, Send

METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
BUCKETS_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
NAMED_PATHS = frozenset(
    {path for _, path in ROUTE_RULES if "{" not in path}
    | {"/healthz", "/readyz", "/login", "/logout", "/ping", METRICS_PATH}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Current values of one metric.

    Names follow Prometheus' conventions: base units (seconds, bytes, ratios) at the end, and
    ``_total`` after them for a counter.
    """

    name: str
    """Name without the prefix. The name of a counter ends in ``_total``."""

    text: str
    values: Mapping[str, float] | Mapping[tuple[str, str], float]
    """Values by label value, or by those of several labels; the key is "" without a label."""

    label: str | tuple[str, ...] = ""

    @property
    def is_counter(self) -> bool:
        """Return whether the metric is a counter."""
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels."""
        return tuple(filter(None, _as_tuple(self.label)))

    @property
    def samples(self) -> dict[tuple[str, ...], float]:
        """Return the values by the values of all labels."""
        count = len(self.labels)
        return {_as_tuple(key)[:count]: value for key, value in self.values.items()}


def _as_tuple(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


class Metrics:
    """Metrics of the server.

    Args:
        readers: Functions that return further metrics; called at each scrape.
    """

    def __init__(self, readers: Iterable[Callable[[], Iterable[Reading]]] = ()) -> None:
        self._readers = list(readers)
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "rankscope_http_requests_total",
            "Requests answered.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "rankscope_http_request_duration_seconds",
            "Time from a request's header to the end of its answer.",
            ["route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        Info("rankscope_build", "Version of the server.", registry=self._registry).info(
            {"version": _own_version(), "python": platform.python_version()}
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_Readings(self._readers))

    def add(self, reader: Callable[[], Iterable[Reading]]) -> None:
        """Call ``reader`` too at each scrape."""
        self._readers.append(reader)

    def readings(self) -> list[Reading]:
        """Return what the readers return now."""
        return [reading for reader in list(self._readers) for reading in reader()]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Readings:
    def __init__(self, readers: list[Callable[[], Iterable[Reading]]]) -> None:
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        for reader in list(self._readers):
            for reading in reader():
                kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
                family = kind(f"rankscope_{reading.name}", reading.text, labels=reading.labels)
                for labels, number in reading.samples.items():
                    family.add_metric(labels, number)
                yield family


class MeasuredApp:
    """ASGI middleware that counts and times requests. It is in front of the gate, so refused
    requests count too.
    """

    def __init__(self, app: AsgiApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.perf_counter()
        status = "500"  # uvicorn's answer if the application raises

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        route = route_label(scope["path"])
        try:
            await self._app(scope, receive, counted)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.requests.labels(route, method, status).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - begin_s)


def metrics_router(metrics: Metrics) -> APIRouter:
    """Return the route that Prometheus scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get(METRICS_PATH, summary="Metrics for Prometheus", response_class=Response)
    def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router


def route_label(path: str) -> str:
    """Return the label of a path: one of a small fixed set."""
    if path in NAMED_PATHS:
        return path
    if path.startswith(f"{API_PREFIX}rows/"):
        return f"{API_PREFIX}rows"
    if path.startswith(API_PREFIX):
        return "unknown"
    return "static" if path.startswith(OPEN_PREFIXES) else "pages"


def _own_version() -> str:
    try:
        return version("rankscope")
    except PackageNotFoundError:
        return "unknown"
