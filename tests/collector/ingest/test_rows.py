from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.ingest.router import JSON_TYPE
from rankscope.collector.ingest.rows import ROW_TABLES
from rankscope.collector.read.runs import read_events, read_run
from tests.support.collector.cut_builder import PROCESS, SEGMENT, span_cut
from tests.support.collector.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def collector(store: Store) -> Iterator[Collector]:
    def placed(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "rack": f"rack of {row['host']}"}

    with serving(store, placed=placed) as served:
        yield served


def test_every_offered_column_exists_in_the_store(store: Store) -> None:
    for table, known in ROW_TABLES.items():
        rows = store.rows(f"DESCRIBE TABLE {table}")
        assert known.identity.keys() | known.others.keys() <= {row["name"] for row in rows}, table


def test_descriptions_are_stored_and_replace_earlier_ones(
    collector: Collector, store: Store, run_id: str
) -> None:
    run = {"run_id": run_id, "epoch": 0, "world_size": 8, "layout": {"dp": 8}}
    rank = {
        "run_id": run_id,
        "epoch": 0,
        "rank": 0,
        "process": PROCESS,
        "host": "h",
        "dropped": {"x": 3},
    }
    for revision, state in ((1, "running"), (2, "ended"), (2, "ended")):
        changed = [{**run, "state": state, "revision": revision}]
        assert collector.rows("runs", changed).json() == {"schema": 1, "num_rows": 1}
    collector.rows("ranks", [{**rank, "revision": 1}])
    collector.rows(
        "groups", [{"run_id": run_id, "epoch": 0, "group_id": 2**64 - 1, "members": [0, 1]}]
    )
    collector.rows("manifests", [{"run_id": run_id, "manifest_hash": "ab", "settings": {"a": "b"}}])
    collector.rows(
        "events",
        [{"run_id": run_id, "epoch": 0, "rank": 0, "at_ns": 5, "kind": "exit", "text": "a\nb"}],
    )

    found = read_run(store, run_id)
    assert [(row["state"], row["layout"]) for row in found.epochs] == [("ended", {"dp": 8})]
    assert [(row["rack"], row["dropped"]) for row in found.ranks] == [("rack of h", {"x": 3})]
    assert [(row["group_id"], row["members"]) for row in found.groups] == [(2**64 - 1, [0, 1])]
    assert [event["text"] for event in read_events(store, run_id)] == ["a\nb"]


def test_rows_of_a_host_need_no_run(collector: Collector, store: Store, run_id: str) -> None:
    sample = {"host": run_id, "device": 0, "at_ns": 7, "name": "gpu.power_w", "value": 400}
    clock = {"host": run_id, "boot_id": "ab", "at_ns": 1, "offset_ns": -5}

    assert collector.rows("samples", [sample, sample]).status_code == 200
    assert collector.rows("clock", [clock]).status_code == 200

    bound = {"host": run_id}
    seen = store.rows("SELECT run_id, value FROM samples FINAL WHERE host = {host:String}", bound)
    assert seen == [{"run_id": "", "value": 400.0}]
    assert store.rows("SELECT offset_ns FROM clock WHERE host = {host:String}", bound) == [
        {"offset_ns": -5}
    ]


RUN = {"run_id": "r", "epoch": 0, "revision": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"epoch": 0, "revision": 1}, "run_id: Field required"),
        ({**RUN, "run_id": "../x"}, "run name"),
        ({**RUN, "run_id": ""}, "run name"),
        ({**RUN, "epoch": 2**31}, "epoch: Input should be less than"),
        ({**RUN, "epoch": "0"}, "epoch: Input should be a valid integer"),
        ({**RUN, "epoch": True}, "epoch: Input should be a valid integer"),
        ({**RUN, "epoch": 0.5}, "epoch: Input should be a valid integer"),
        ({**RUN, "epoch": 2.0**31}, "epoch: Input should be less than"),
        ({**RUN, "revision": -1}, "revision: Input should be greater than or equal to 0"),
        ({**RUN, "revision": 1 << 63}, "revision: Input should be less than"),
        ({**RUN, "flops_per_token": "many"}, "flops_per_token: Input should be a valid number"),
        ({**RUN, "flops_per_token": 10**400}, "flops_per_token: Input should be a valid number"),
        ({**RUN, "layout": [1]}, "layout: Input should be a valid dictionary"),
        ({**RUN, "layout": {"dp": 2**40}}, "layout: Input should be less than"),
        (
            {**RUN, "layout": {str(n): 1 for n in range(600)}},
            "layout: Dictionary should have at most 512",
        ),
        ({**RUN, "state": 3}, "state: Input should be a valid string"),
        ({**RUN, "manifest": "x" * (1 + (4 << 20))}, "manifest: "),
        ([], "row 1: Input should be a valid dictionary"),
    ],
)
def test_an_invalid_row_is_rejected_with_the_name_of_its_column(
    collector: Collector,
    store: Store,
    row: Any,  # noqa: ANN401 -- any JSON value
    message: str,
) -> None:
    answer = collector.rows("runs", [{**RUN, "run_id": "never-stored"}, row])

    assert answer.status_code == 422
    assert message in answer.json()["error"]
    assert store.rows("SELECT run_id FROM runs WHERE run_id = 'never-stored'") == []


@pytest.mark.parametrize("table", ["spans", "ledger", "owners", "schema_version", "system.users"])
def test_no_other_table_takes_rows(collector: Collector, table: str) -> None:
    assert collector.rows(table, []).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[" * 100_000, 400),
        (b'{"schema": 1, "rows": [' + b"9" * 10_000_000 + b"]}", 413),
        (b'{"schema": 1, "rows": [' + b"9" * 1_000_000 + b"]}", 400),
        (b'{"schema": 1, "rows": [], "rows": [{}]}', 422),
        (b'{"schema": 1, "rows": [NaN]}', 422),
        (b'{"schema": 1, "rows": ["\xff"]}', 400),
        (b'{"schema": 2, "rows": []}', 422),
        (b'{"schema": 1}', 422),
        (b"[]", 422),
        (json.dumps({"schema": 1, "rows": [{}] * 10_001}).encode(), 413),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_or_malicious_json_is_rejected(
    collector: Collector, run_id: str, body: bytes, status: int
) -> None:
    answer = collector.post("/v1/rows/runs", body, media=JSON_TYPE)

    assert answer.status_code == status
    assert collector.rows("runs", [{**RUN, "run_id": run_id}]).status_code == 200


def test_texts_are_stored_without_control_characters(
    collector: Collector, store: Store, run_id: str
) -> None:
    event = {"run_id": run_id, "epoch": 0, "rank": 0, "at_ns": 5, "kind": "x\x1b[2J\r\ny"}
    text = "ok\n\x1b[31m\u202eevil\ud800"
    body = json.dumps({"schema": 1, "rows": [{**event, "text": text}]}).encode()
    assert collector.post("/v1/rows/events", body, media=JSON_TYPE).status_code == 200

    (found,) = read_events(store, run_id)
    assert found["kind"] == "x\\x1b[2J\\r\\ny"
    assert found["text"].startswith("ok\n")
    assert all(letter == "\n" or letter.isprintable() for letter in found["text"])


# --- resume


def test_resume_returns_the_end_of_the_stored_rows(collector: Collector, run_id: str) -> None:
    collector.ship(
        span_cut(run_id, 0, 10), span_cut(run_id, 20, 30), span_cut(run_id, 0, 5, rank=1, segment=9)
    )

    whole = collector.resume(run_id=run_id)
    of_rank = collector.resume(run_id=run_id, rank=[1])
    unknown = collector.resume(run_id=f"{run_id}-x")

    assert whole.status_code == 200
    assert whole.json() == {
        "schema": 1,
        "end_rows": {str(SEGMENT): 10, "9": 5},
        "unanswered": [],
        "source_format": None,
        "next": None,
    }
    assert of_rank.json()["end_rows"] == {"9": 5}
    assert unknown.json()["end_rows"] == {}


def test_resume_lists_unconfirmed_cuts(collector: Collector, store: Store, run_id: str) -> None:
    line = {
        "run_id": run_id, "epoch": 2, "rank": 3, "process": PROCESS, "segment": 2**64 - 1,
        "first_row": 5, "end_row": 9, "sha256": "ab", "state": "sent", "revision": 1,
    }  # fmt: skip
    store.insert_rows("ledger", [line])

    assert collector.resume(run_id=run_id).json()["unanswered"] == [
        {"epoch": 2, "rank": 3, "process": PROCESS, "segment": 2**64 - 1, "first_row": 5,
         "end_row": 9},
    ]  # fmt: skip


def test_resume_has_pages_of_at_most_64_kib(
    collector: Collector, store: Store, run_id: str
) -> None:
    lines = [
        {
            "run_id": run_id, "rank": 0, "process": PROCESS, "segment": 2**63 + number,
            "first_row": 0, "end_row": 4, "sha256": "ab", "revision": 2,
            "state": "stored" if number % 2 else "sent",
        }
        for number in range(700)
    ]  # fmt: skip
    store.insert_rows("ledger", lines)

    end_rows: dict[str, int] = {}
    unanswered: list[object] = []
    after = 0
    for _ in range(20):
        page = collector.resume(run_id=run_id, after=after)
        assert len(page.content) <= 64 * 1024
        end_rows |= page.json()["end_rows"]
        unanswered += page.json()["unanswered"]
        after = page.json()["next"]
        if after is None:
            break

    assert (len(end_rows), len(unanswered)) == (350, 350)


@pytest.mark.parametrize(
    "query",
    [{}, {"run_id": "a/b"}, {"run_id": "r", "after": -1}, {"run_id": "r", "rank": ["x"]}],
    ids=str,
)
def test_an_invalid_resume_query_is_422(collector: Collector, query: dict[str, Any]) -> None:
    assert collector.resume(**query).status_code == 422
