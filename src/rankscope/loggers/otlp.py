"""Steps as spans and metrics, findings as logs, over OTLP: for Tempo, Jaeger, Loki, Grafana.

Ids follow from run and step, so a receiver can recognize a span that is sent again. All is exported
at once, and not by the SDK's queues, which drop what is too much.
"""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_S

from ..errors import FailedError
from .records import level_of, need

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding

    from .records import Diagnosis, LoggedStep, Target

PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
EXPORTER = "opentelemetry.exporter.otlp.proto.http"

DEFAULT_ENDPOINT = "by OTEL_EXPORTER_OTLP_ENDPOINT"
"""`OtlpSink.into` if the endpoint is that of the environment: http://localhost:4318 without one."""

MAX_BATCH = 500
"""Steps of one request."""

UNITS = {"step_time_s": ("rankscope.step.duration", "s"), "mfu": ("rankscope.mfu", "1"),
         "slowdown": ("rankscope.slowdown", "1")}  # fmt: skip
"""Name and unit of each value's metric."""


class OtlpSink:
    """Sends to a receiver over HTTP. `into` is its address; None: that of the SDK's variables."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.into = target.into or DEFAULT_ENDPOINT
        base = "" if self.into == DEFAULT_ENDPOINT else self.into.rstrip("/")
        self._spans, self._metrics, self._logs = (
            getattr(need(f"{EXPORTER}.{module}", PACKAGES), name)(
                endpoint=f"{base}/v1/{signal}" if base else None
            )
            for module, name, signal in (
                ("trace_exporter", "OTLPSpanExporter", "traces"),
                ("metric_exporter", "OTLPMetricExporter", "metrics"),
                ("_log_exporter", "OTLPLogExporter", "logs"),
            )
        )
        self._resource = need("opentelemetry.sdk.resources", PACKAGES).Resource.create(
            {"service.name": "rankscope", "rankscope.run": target.run}
        )
        scopes = need("opentelemetry.sdk.util.instrumentation", PACKAGES)
        self._scope = scopes.InstrumentationScope("rankscope", version("rankscope"))

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Send each step as a span, and its values as metrics of its time.

        Raises:
            FailedError: The receiver does not take them.
        """
        for begin in range(0, len(steps), MAX_BATCH):
            batch = steps[begin : begin + MAX_BATCH]
            self._send(self._spans, [self._to_span(step) for step in batch], "spans")
            self._send(self._metrics, self._to_metrics(batch), "metrics")

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Send each new finding as a log of the last step that shows it.

        Raises:
            FailedError: The receiver does not take them.
        """
        logs = [self._to_log(finding, diagnosis) for finding in new]
        if logs:
            self._send(self._logs, logs, "logs")

    def close(self, *, has_ended: bool) -> None:
        """Close the connections."""
        for exporter in (self._spans, self._metrics, self._logs):
            exporter.shutdown()

    def _send(self, exporter: Any, rows: object, what: str) -> None:  # noqa: ANN401  # of the SDK
        result = exporter.export(rows)
        if result.name != "SUCCESS":
            raise FailedError(f"the receiver of OTLP did not take the {what}: {self.into}")

    def _ids(self, step: int) -> tuple[int, int]:
        """Return the ids of trace and span of a step."""
        name = f"{self._target.run}\0{self._target.started_ns}\0{step}"
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])

    def _to_span(self, step: LoggedStep) -> object:
        trace = need("opentelemetry.trace", PACKAGES)
        sdk = need("opentelemetry.sdk.trace", PACKAGES)
        trace_id, span_id = self._ids(step.step)
        return sdk.ReadableSpan(
            name="training step",
            context=trace.SpanContext(
                trace_id, span_id, is_remote=False, trace_flags=trace.TraceFlags(1)
            ),
            resource=self._resource,
            instrumentation_scope=self._scope,
            attributes={
                "rankscope.step": step.step,
                **{name.replace("/", "."): value for name, value in step.values().items()},
            },
            start_time=step.end_ns - round(step.step_time_s * NS_PER_S),
            end_time=step.end_ns,
        )

    def _to_metrics(self, steps: Sequence[LoggedStep]) -> object:
        sdk = need("opentelemetry.sdk.metrics.export", PACKAGES)
        metrics = [
            sdk.Metric(
                name=name,
                description=None,
                unit=unit,
                data=sdk.Gauge(
                    data_points=[
                        sdk.NumberDataPoint(
                            attributes={"rankscope.run": self._target.run},
                            start_time_unix_nano=0,
                            time_unix_nano=step.end_ns,
                            value=value,
                        )
                        for step in steps
                        if (value := getattr(step, field)) is not None
                    ]
                ),
            )
            for field, (name, unit) in UNITS.items()
        ]
        return sdk.MetricsData(
            resource_metrics=[
                sdk.ResourceMetrics(
                    resource=self._resource,
                    scope_metrics=[
                        sdk.ScopeMetrics(
                            scope=self._scope,
                            metrics=[metric for metric in metrics if metric.data.data_points],
                            schema_url="",
                        )
                    ],
                    schema_url="",
                )
            ]
        )

    def _to_log(self, finding: Finding, diagnosis: Diagnosis) -> object:
        api = need("opentelemetry._logs", PACKAGES)
        trace = need("opentelemetry.trace", PACKAGES)
        level = level_of(finding.severity)
        step = diagnosis.step if finding.steps is None else finding.steps[1]
        trace_id, span_id = self._ids(step)
        known = {
            "rankscope.cause": finding.cause,
            "rankscope.severity": None if finding.severity is None else str(finding.severity),
            "rankscope.ranks": list(finding.ranks),
            "rankscope.hosts": list(finding.hosts),
            "rankscope.first_step": None if finding.steps is None else finding.steps[0],
            "rankscope.last_step": None if finding.steps is None else finding.steps[1],
            "rankscope.saved_s": finding.saved_s,
            "rankscope.confidence": finding.confidence,
            "rankscope.link": diagnosis.link,
        }
        record = api.LogRecord(
            timestamp=diagnosis.at_ns,
            observed_timestamp=time.time_ns(),
            trace_id=trace_id if step >= 0 else None,
            span_id=span_id if step >= 0 else None,
            trace_flags=trace.TraceFlags(1),
            severity_text=level,
            severity_number=api.SeverityNumber[level],
            body=f"{finding.cause}: {finding.evidence}",
            attributes={name: value for name, value in known.items() if value is not None},
            event_name="rankscope.finding",
        )
        logs = need("opentelemetry.sdk._logs", PACKAGES)
        return logs.ReadableLogRecord(
            log_record=record, resource=self._resource, instrumentation_scope=self._scope
        )
