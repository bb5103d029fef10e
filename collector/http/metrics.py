"""`/metrics` for Prometheus: what the server counts, with labels of which there are few.

No label is a run, a rank, a host or a client: their number has no bound, and a series is
kept for each value of a label.
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
    from collections.abc import Callable, Iterable, Iterator

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
    """One figure as it is now, by at most one label."""

    name: str
    """Without the prefix; a counter's ends in ``_total``."""

    text: str
    """What it counts, for a person."""

    values: dict[str, float]
    """By the label's value; "" where there is no label."""

    label: str = ""

    @property
    def is_counter(self) -> bool:
        """Return whether it only ever grows."""
        return self.name.endswith("_total")


class Metrics:
    """All that the server counts.

    Args:
        readers: Asked at each scrape for figures that others keep.
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
            "rankscope_http_request_seconds",
            "From a request's header to the end of its answer.",
            ["route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        Info("rankscope_build", "What runs here.", registry=self._registry).info(
            {"version": _own_version(), "python": platform.python_version()}
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_Readings(self._readers))

    def add(self, reader: Callable[[], Iterable[Reading]]) -> None:
        """Ask ``reader`` too at each scrape."""
        self._readers.append(reader)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it."""
        return generate_latest(self._registry)


class _Readings:
    """Hands what the readers say to the registry."""

    def __init__(self, readers: list[Callable[[], Iterable[Reading]]]) -> None:
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        for reader in list(self._readers):
            for reading in reader():
                kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
                labels = [reading.label] if reading.label else []
                family = kind(f"rankscope_{reading.name}", reading.text, labels=labels)
                for value, number in reading.values.items():
                    family.add_metric([value] if labels else [], number)
                yield family


class MeasuredApp:
    """Counts and times what ``app`` answers; stands before the gate, so refusals count too.

    Args:
        app: The whole application.
        metrics: Where to.
        perf_s: Clock.
    """

    def __init__(
        self, app: AsgiApp, metrics: Metrics, *, perf_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._perf_s = perf_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = self._perf_s()
        status = "500"  # what uvicorn makes of an error that leaves the application

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        route = route_of(scope["path"])
        try:
            await self._app(scope, receive, counted)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.requests.labels(route, method, status).inc()
            self._metrics.seconds.labels(route).observe(self._perf_s() - begin_s)


def metrics_router(metrics: Metrics) -> APIRouter:
    """Return the route that Prometheus scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get(METRICS_PATH, summary="Figures for Prometheus", response_class=Response)
    def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router


def route_of(path: str) -> str:
    """Return the label of a path: one of few, whatever was asked for."""
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
