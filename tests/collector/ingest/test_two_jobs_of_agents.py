from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.http.tokens import Role
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import MANIFEST_FILE
from tests.support.collector.agent_rig import Rig
from tests.support.collector.running_server import running
from tests.support.collector.serving import OWN, serving, tokens_for
from tests.support.collector.spool_builder import ANCHOR_UNIX_NS, SpoolBuilder
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

SECOND_NS = 10**9

pytestmark = pytest.mark.slow


@pytest.fixture
def collector(store: Store) -> Iterator[Collector]:
    with serving(store) as served:
        yield served


def write_job(spool: Path, run_id: str, *, name: str, rank: int, began_s: int) -> None:
    """Write the ended process of one rank, with steps 0 to 3."""
    builder = SpoolBuilder(
        spool, run_id=run_id, rank=rank, anchor_unix_ns=ANCHOR_UNIX_NS + began_s * SECOND_NS
    )
    builder.write_json(MANIFEST_FILE, {"job": f"launch of {name}"})
    for step in range(4):
        start_ns = 1_000 + step * SECOND_NS
        builder.span(name, step=step, start_ns=start_ns)
        builder.step(step, start_ns=start_ns, duration_ns=SECOND_NS)
    builder.end(at_ns=ANCHOR_UNIX_NS + (began_s + 5) * SECOND_NS)


@pytest.mark.parametrize("second_began_s", [60, 1], ids=["one after the other", "at once"])
def test_agents_of_two_hosts_send_two_jobs_of_one_name_as_two_runs(
    store: Store, run_id: str, tmp_path: Path, collector: Collector, second_began_s: int
) -> None:
    with running(collector.app) as server:
        url = f"http://127.0.0.1:{server.port}"
        hosts = [tmp_path / "host-0", tmp_path / "host-1"]
        for rank, spool in enumerate(hosts):
            write_job(spool, run_id, name="first", rank=rank, began_s=0)
        rigs = [Rig(spool, url, environment={"RANKSCOPE_TOKEN": OWN}) for spool in hosts]
        for rig in rigs:
            rig.turn()
        for rank, spool in enumerate(hosts):
            write_job(spool, run_id, name="second", rank=rank, began_s=second_began_s)
        for rig in rigs:
            rig.turn_until(lambda rig=rig: bool(rig.journal.end_rows(f"{run_id}-2")))  # type: ignore[misc]
        for rig in rigs:
            rig.turn()
            rig.close()
        # An agent that lost its journal asks again, and sends nothing twice.
        again = Rig(hosts[0], url, environment={"RANKSCOPE_TOKEN": OWN})
        again.turn()
        again.close()

    assert names_of(store, run_id) == ["first"] * 8
    assert names_of(store, f"{run_id}-2") == ["second"] * 8
    said = [line for rig in rigs for line in rig.lines if line.startswith(f"{run_id}-2: another")]
    assert len(said) == 2
    info = StoreSource(store).run_info(f"{run_id}-2")
    assert [rank.rank for rank in info.epochs[0].ranks] == [0, 1]


def question(run_id: str, **facts: Any) -> dict[str, Any]:  # noqa: ANN401 -- columns
    return {"run_id": run_id, "epoch": 0, "rank": 0, "process": "a" * 32, **facts}


def test_the_answer_for_a_process_never_changes(collector: Collector, run_id: str) -> None:
    first = collector.rows("processes", [question(run_id)]).json()
    again = collector.rows("processes", [question(run_id, first_step=7, job="x")]).json()

    assert first["placements"] == [{"run_id": run_id, "epoch": 0, "note": ""}]
    assert again == first


def test_a_process_waits_until_it_is_known_whether_it_continues(
    collector: Collector, run_id: str
) -> None:
    collector.rows("processes", [question(run_id, job="x")])

    asked = collector.rows("processes", [question(run_id, job="y", process="b" * 32)])

    assert asked.json()["placements"] == [None]


def test_a_run_of_another_owner_is_no_place_for_a_process(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    book, by = tokens_for(tmp_path, team=(Role.INGEST, ""), other=(Role.INGEST, ""))
    with serving(store, tokens=book) as served:
        served.rows("processes", [question(run_id, job="x")], token=by["other"])
        asked = served.rows(
            "processes", [question(run_id, job="y", process="b" * 32)], token=by["team"]
        )

    (placement,) = asked.json()["placements"]
    assert (placement["run_id"], placement["epoch"]) == (f"{run_id}-2", 0)
    assert placement["note"].startswith(f"{run_id}-2: another job has the run name {run_id}")
