"""A run that is written through the server that holds the store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.client import served_writer
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.client.served_writer import ServedWriter
from rankscope.collector.errors import RunBegunError, RunExistsError, StoreError
from rankscope.collector.store.location import ServerFile
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.import_trace import import_files
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions
from tests.collector.importers.test_kineto import add_step
from tests.integration.programs import serving
from tests.integration.test_serve import Job
from tests.support.collector.kineto_builder import TraceBuilder
from tests.support.collector.talking_server import speaking
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of an empty store that a server holds."""
    path = tmp_path_factory.mktemp("served") / "store"
    with serving(store=path):
        yield f"chdb://{path}"


def simulate(url: str, *, run_id: str, seed: int = 1) -> str:
    options = SimulateOptions(
        scenario="slow-compute",
        run_id=run_id,
        num_ranks=8,
        num_steps=8,
        seed=seed,
        store_url=url,
    )
    return simulate_run(options)


def analysis(url: str, run_id: str) -> dict[str, Any]:
    text = analyze_stored(AnalyzeOptions(run_id=run_id, as_json=True, store_url=url))
    document: dict[str, Any] = json.loads(text)
    for finding in document["findings"]:
        del finding["follows"]  # the state that a server tracks
    if document["mfu"] is not None:
        del document["mfu"]["usual"]  # of an earlier run in the same store
    return document


def num_rows(url: str, run_id: str) -> dict[str, int]:
    with open_for_reading(url) as store:
        (found,) = store.rows(
            "SELECT (SELECT count() FROM spans WHERE run_id = {run:String}) AS spans,"
            " (SELECT count() FROM steps WHERE run_id = {run:String}) AS steps,"
            " (SELECT count() FROM bad_rows WHERE run_id = {run:String}) AS bad_rows,"
            " (SELECT count() FROM kernels FINAL WHERE run_id = {run:String}) AS kernels",
            {"run": run_id},
        )
    return found


def test_a_simulation_is_the_same_as_in_a_store_of_this_process(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_writer, "REQUEST_CUT_ROWS", 300)  # a step has 640 spans
    own = f"chdb://{tmp_path / 'own'}"

    assert simulate(served, run_id="sim") == simulate(own, run_id="sim")

    assert analysis(served, "sim") == analysis(own, "sim")
    assert analysis(served, "sim")["findings"][0]["cause"] == "slow-compute"
    assert num_rows(served, "sim") == num_rows(own, "sim")
    with pytest.raises(RunExistsError):
        simulate(served, run_id="sim")


def test_an_interrupted_simulation_is_sent_again_without_duplicates(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ServedWriter._send
    num_sent = 0

    def send_five(self: ServedWriter, path: str, body: bytes, content_type: str) -> object:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 5:
            raise KeyboardInterrupt
        return send(self, path, body, content_type)

    with monkeypatch.context() as patched:
        patched.setattr(ServedWriter, "_send", send_five)
        with pytest.raises(KeyboardInterrupt):
            simulate(served, run_id="again")

    with pytest.raises(RunBegunError, match="choose another --run name"):
        simulate(served, run_id="again", seed=2)
    simulate(served, run_id="again")

    own = f"chdb://{tmp_path / 'own'}"
    simulate(own, run_id="again")
    assert num_rows(served, "again") == num_rows(own, "again")
    assert analysis(served, "again") == analysis(own, "again")


@needs_traces
def test_an_import_is_the_same_as_in_a_store_of_this_process(served: str, tmp_path: Path) -> None:
    own = f"chdb://{tmp_path / 'own'}"

    def bring(url: str, *, run_id: str = "AR", name: str = "AR") -> str:
        return import_files(
            [TRACES / f"trace-{name}.parquet"],
            file_format="bytedance",
            run_id=run_id,
            meta=TRACES / f"meta-{name}.yaml",
            store_url=url,
        )

    assert bring(served) == bring(own)
    assert analysis(served, "AR") == analysis(own, "AR")
    assert num_rows(served, "AR") == num_rows(own, "AR")
    assert bring(served).endswith("nothing was written")
    with pytest.raises(RunExistsError):
        bring(served, name="ST")


def test_a_spool_and_a_profile_are_the_same_as_in_a_store_of_this_process(
    served: str, tmp_path: Path
) -> None:
    spool, own = tmp_path / "spool", f"chdb://{tmp_path / 'own'}"
    job = Job(spool, run_id="spooled")
    job.record_steps(8)
    job.record_steps(12, slow_ms=180)
    job.end()

    def bring(url: str, *paths: Path, name: str, run: str | None = None) -> str:
        return import_files(paths, file_format=name, run_id=run, meta=None, store_url=url)

    said = bring(served, spool, name="rankscope")
    assert said == "imported run spooled: 80 spans. Next: rankscope analyze spooled"
    assert bring(own, spool, name="rankscope") == said
    assert (
        bring(served, spool, name="rankscope") == f"{spool} is already stored: nothing was written"
    )
    assert analysis(served, "spooled") == analysis(own, "spooled")
    assert num_rows(served, "spooled") == num_rows(own, "spooled")

    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        trace = TraceBuilder(rank, 2)
        for step in range(4):
            trace.step(step, 60 * step, 60 * step + 60)
            add_step(trace, 60 * step + 1, reduced=60 * step + 56)
        trace.write(folder)
    for url in (served, own):
        said = bring(url, folder, name="kineto", run="profiled")
        assert said.startswith("imported run profiled")
    assert num_rows(served, "profiled") == num_rows(own, "profiled")
    assert num_rows(served, "profiled")["kernels"] > 0


def test_the_error_names_a_server_that_has_stopped(empty_store: Store) -> None:
    now_s = [0.0]
    stopped = ServerFile(pid=1, url="http://127.0.0.1:9", token="t")
    writer = ServedWriter(
        stopped,
        empty_store,
        pause=lambda s: now_s.__setitem__(0, now_s[0] + s),
        monotonic_s=lambda: now_s[0],
    )

    with pytest.raises(StoreError, match=r"http://127\.0\.0\.1:9 .* not accepted within 120 s"):
        writer.upsert("runs", [{"run_id": "x", "epoch": 0, "revision": 1}])
    assert now_s[0] == pytest.approx(120)
    writer.close()


def test_a_server_that_is_busy_is_waited_for_longer(empty_store: Store) -> None:
    # GIVEN a server that is busy for 20 minutes, as in the analysis of a large run
    now_s = [0.0]

    def talk(connection: socket.socket) -> None:
        status = "503 Service Unavailable" if now_s[0] < 1200 else "200 OK"
        connection.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
        )

    with speaking(talk) as port:
        writer = ServedWriter(
            ServerFile(pid=1, url=f"http://127.0.0.1:{port}", token="t"),
            empty_store,
            pause=lambda s: now_s.__setitem__(0, now_s[0] + max(s, 240)),
            monotonic_s=lambda: now_s[0],
        )

        writer.upsert("runs", [{"run_id": "x", "epoch": 0, "revision": 1}])
        writer.close()

    # THEN it gets what it refused before
    assert now_s[0] == 1200
