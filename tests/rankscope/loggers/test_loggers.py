"""Runs in the trackers, read back with each tracker's own reader."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.store.store import open_store
from rankscope.errors import BadInputError, FailedError
from rankscope.loggers.follow import LogRequest, log_run
from rankscope.loggers.records import Target
from rankscope.loggers.sinks import SINKS
from tests.support.rankscope.incident_runs import store_run
from tests.support.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.collector.store.store import Store

pytestmark = [
    pytest.mark.slow,
    # Those of the trackers, of their own.
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

RUN = "live"
WHOLE = "whole"
NUM_STEPS = 12

COPY = """
INSERT INTO {table} SELECT * REPLACE ({changes}) FROM (
    SELECT * FROM {table} FINAL WHERE run_id = 'whole' AND {condition}
)
"""

ADDRESS = "https://rankscope.example"
FAULT = "slow-compute:rank=5,factor=1.8,steps=3-11"
STEPS = [*range(NUM_STEPS)]
NUM_STORED = 6

SIGNALS = {
    "/v1/traces": ("trace", "resource_spans", "scope_spans", "spans"),
    "/v1/metrics": ("metrics", "resource_metrics", "scope_metrics", "metrics"),
    "/v1/logs": ("logs", "resource_logs", "scope_logs", "log_records"),
}
"""Of each path: the signal, and the fields of its requests."""

WANDB_HEADER = 7
BLOCK, CHUNK_HEADER = 32_768, 7
FULL, LAST = 1, 4


def begin_run(store: Store, *faults: str, num_steps: int) -> None:
    """Store a running job with its first steps."""
    store_run(store, WHOLE, *faults, num_steps=NUM_STEPS)
    for table in ("ranks", "groups", "manifests", "ledger"):
        store.command(_copy(table))
    _add_steps(store, 0, num_steps)
    store.command(_copy("runs", state="running"))


def end_run(store: Store, *, num_stored: int) -> None:
    """Store the other steps, and end the job."""
    _add_steps(store, num_stored, NUM_STEPS)
    store.command(_copy("runs", state="ended"))


def _add_steps(store: Store, begin: int, end: int) -> None:
    for table in ("spans", "steps", "microbatches"):
        store.command(_copy(table, condition=f"step >= {begin} AND step < {end}"))


def _copy(table: str, *, state: str | None = None, condition: str = "1") -> str:
    changes = f"'{RUN}' AS run_id"
    if state is not None:
        changes += f", '{state}' AS state, toUnixTimestamp64Nano(now64(9)) AS created_ns"
    return COPY.format(table=table, changes=changes, condition=condition)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store with a running job, of which some steps are stored."""
    folder = tmp_path_factory.mktemp("begun")
    with open_store(f"chdb://{folder}/store") as store:
        begin_run(store, FAULT, num_steps=NUM_STORED)
    return folder / "store"


@pytest.fixture
def url(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a copy of the store, in the folder in which the test works."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(begun, tmp_path / "store", symlinks=True)
    return f"chdb://{tmp_path}/store"


def log_interrupted(url: str, to: str, into: str | None = None) -> list[str]:
    """Log a run twice: until an interruption, and then until its end. Return the lines."""
    request = LogRequest(run=RUN, to=to, into=into, address=ADDRESS, store_url=url)
    lines: list[str] = []

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def end(_: float) -> None:
        with open_store(url) as store:
            end_run(store, num_stored=NUM_STORED)

    with pytest.raises(KeyboardInterrupt):
        log_run(request, folder=Path("logged"), show=lines.append, sleep=interrupt)
    done = log_run(request, folder=Path("logged"), show=lines.append, sleep=end)
    assert done.startswith(f"logged run {RUN} up to step {NUM_STEPS - 1}, with ")
    return lines


def tracker(module: str) -> Any:  # noqa: ANN401  # a module
    """Return a module of a tracker; skip the test without it."""
    reason = f"{module} is not installed: make trackers tests with all of them"
    return pytest.importorskip(module, reason=reason)


def read_leveldb_log(content: bytes, *, first: int) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB: blocks of chunks of crc, size, type and data.

    Args:
        content: The blocks.
        first: Bytes of the first block that come before it.
    """
    at, record = 0, b""
    while at < len(content):
        rest = BLOCK - (at + first) % BLOCK
        if rest < CHUNK_HEADER:
            at += rest
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + CHUNK_HEADER : at + CHUNK_HEADER + size]
        at += CHUNK_HEADER + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def test_tensorboard_has_each_step_once_and_the_verdict(url: str) -> None:
    loader = tracker("tensorboard.backend.event_processing.event_accumulator")

    log_interrupted(url, "tensorboard", "runs/mine")

    events = loader.EventAccumulator("runs/mine/rankscope", {"tensors": 0}).Reload()
    assert {*events.Tags()["tensors"]} >= {
        "rankscope/step_time_s",
        "rankscope/mfu",
        "rankscope/slowdown",
        "rankscope/verdict",
    }
    for name in ("step_time_s", "mfu"):
        assert [event.step for event in events.Tensors(f"rankscope/{name}")] == STEPS
    texts = [event.tensor_proto.string_val[0] for event in events.Tensors("rankscope/verdict")]
    assert "Rank 5" in texts[-1].decode()
    assert ADDRESS in texts[-1].decode()


def test_mlflow_has_each_step_once_and_the_verdict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = tracker("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path("mlruns").absolute().as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    lines = log_interrupted(url, "mlflow")

    run_id = lines[0].rpartition(" ")[2]
    assert lines == [f"logging run {RUN} into mlflow: {run_id}"] * 2
    client = mlflow.MlflowClient()
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(run_id, "rankscope/step_time_s")
    assert sorted(metric.step for metric in history) == STEPS
    assert found.data.tags["rankscope.verdict"].startswith("Rank 5")
    assert found.data.tags["rankscope.link"].startswith(ADDRESS)
    assert "slow-compute" in found.data.tags["mlflow.note.content"]


def test_the_run_of_a_training_in_mlflow_keeps_its_description_and_its_state(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = tracker("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path("mlruns").absolute().as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient()
    own = client.create_run("0", tags={"mlflow.note.content": "mine"}).info.run_id

    log_interrupted(url, "mlflow", own)

    found = client.get_run(own)
    assert found.info.status == "RUNNING"
    assert found.data.tags["mlflow.note.content"] == "mine"
    assert found.data.metrics["rankscope/slowdown"] > 1.2
    # ... and a run that MLflow does not know is one line
    with pytest.raises(FailedError, match=r"mlflow failed: .*none"):
        log_run(
            LogRequest(run=RUN, to="mlflow", into="none", store_url=url),
            folder=Path("logged"),
            show=lambda _: None,
        )


def test_wandb_offline_has_each_step_once_and_the_verdict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker("wandb")
    records = tracker("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    log_interrupted(url, "wandb")

    steps: list[int] = []
    summary: dict[str, Any] = {}
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        for data in read_leveldb_log(path.read_bytes()[WANDB_HEADER:], first=WANDB_HEADER):
            record = records.Record.FromString(data)
            values = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in (*record.history.item, *record.summary.update)
            }
            if record.HasField("history"):
                steps += [value for name, value in values.items() if name == "rankscope/step"]
            summary |= values
    assert steps == STEPS
    assert summary["rankscope/verdict"].startswith("Rank 5")
    assert summary["rankscope/link"].startswith(ADDRESS)


def test_trackio_has_each_step_once_and_the_verdict(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracker("trackio")

    log_interrupted(url, "trackio", "pretraining/7b")

    (path,) = (tmp_path / "trackio").glob("pretraining*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = '7b'")
        found = [(step, json.loads(metrics)) for step, metrics in rows]
        alerts = database.execute("SELECT title, text, level FROM alerts").fetchall()
    assert sorted(step for step, _ in found) == STEPS
    assert all("rankscope/step_time_s" in metrics for _, metrics in found)
    assert alerts[-1][0].startswith("Rank 5")
    assert alerts[-1][1].startswith(ADDRESS)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    tracker("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    running = Receiver()
    yield running
    running.close()


def decode(receiver: Receiver) -> dict[str, list[Any]]:
    """Return the spans, metrics and logs that were received."""
    found: dict[str, list[Any]] = {"spans": [], "metrics": [], "log_records": []}
    while not receiver.paths.empty():
        path, body = receiver.paths.get(), receiver.bodies.get()
        if receiver.sent_headers.get().get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        signal, resources, scopes, rows = SIGNALS[path]
        module = tracker(f"opentelemetry.proto.collector.{signal}.v1.{signal}_service_pb2")
        request = getattr(module, f"Export{signal.title()}ServiceRequest").FromString(body)
        for resource in getattr(request, resources):
            for scope in getattr(resource, scopes):
                found[rows] += getattr(scope, rows)
    return found


def attributes(row: Any) -> dict[str, Any]:  # noqa: ANN401  # a message of protobuf
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in row.attributes}


def test_otlp_has_a_span_for_each_step_metrics_and_a_log_for_each_finding(
    url: str, receiver: Receiver
) -> None:
    log_interrupted(url, "otlp", receiver.url)

    found = decode(receiver)
    spans = {attributes(span)["rankscope.step"]: span for span in found["spans"]}
    assert sorted(spans) == STEPS
    assert len(found["spans"]) == NUM_STEPS
    for span in found["spans"]:
        lasts_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert lasts_s == pytest.approx(attributes(span)["rankscope.step_time_s"])
    points = {
        metric.name: [point for one in found["metrics"] if one.name == metric.name
                      for point in one.gauge.data_points]
        for metric in found["metrics"]
    }  # fmt: skip
    assert {*points} == {"rankscope.step.duration", "rankscope.mfu", "rankscope.slowdown"}
    assert [point.time_unix_nano for point in points["rankscope.step.duration"]] == [
        spans[step].end_time_unix_nano for step in STEPS
    ]
    slow = next(log for log in found["log_records"] if "slow-compute" in log.body.string_value)
    about = attributes(slow)
    assert slow.severity_text == "ERROR"
    assert [rank.int_value for rank in about["rankscope.ranks"].values] == [5]
    # ... of the trace of the last step that shows it
    assert slow.trace_id == spans[about["rankscope.last_step"]].trace_id


def test_what_a_receiver_refuses_is_sent_again_while_the_run_lives(
    url: str, receiver: Receiver
) -> None:
    # GIVEN a receiver that does not accept the first requests of a running job
    receiver.statuses = [400]
    request = LogRequest(run=RUN, to="otlp", into=receiver.url, store_url=url)
    lines: list[str] = []

    def end(_: float) -> None:
        with open_store(url) as store:
            end_run(store, num_stored=NUM_STORED)

    # WHEN it is logged
    log_run(request, folder=Path("logged"), show=lines.append, sleep=end)

    # THEN the failure is said, and the spans are there
    assert "did not take the spans" in lines[1]
    assert {attributes(span)["rankscope.step"] for span in decode(receiver)["spans"]} == {*STEPS}


def test_an_unknown_run_is_an_error_unless_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"chdb://{tmp_path}/store"

    def begin(_: float) -> None:
        with open_store(url) as store:
            begin_run(store, num_steps=NUM_STEPS)
            end_run(store, num_stored=NUM_STEPS)

    for waits in (False, True):
        request = LogRequest(run=RUN, to="tensorboard", waits=waits, store_url=url)
        with nullcontext() if waits else pytest.raises(UnknownRunError):
            log_run(request, folder=Path("logged"), show=lambda _: None, sleep=begin)

    assert [*Path("runs/live/rankscope").iterdir()]


@pytest.mark.parametrize(
    ("to", "module", "packages"),
    [
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow-skinny"),
        ("tensorboard", "tensorboard.compat.proto.event_pb2", "tensorboard"),
        ("trackio", "trackio", "trackio"),
        (
            "otlp",
            "opentelemetry.exporter.otlp.proto.http.trace_exporter",
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ),
    ],
)
def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, to: str, module: str, packages: str
) -> None:
    # A None in sys.modules makes the import fail as if the package were not there.
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(BadInputError, match=f"is not installed: pip install {packages}$"):
        SINKS[to](Target(run=RUN, started_ns=0, into=None))


def test_the_command_offers_each_tracker() -> None:
    from rankscope.commands.log import Tracker

    assert [*Tracker] == [*SINKS]
