"""Descriptions of many agents at once, through the routes into a real store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.http.tokens import Role
from tests.support.collector.serving import serving, tokens_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import httpx

    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

NUM_HOSTS = 96


def beats_of(run_id: str, rank: int) -> list[Row]:
    return [
        {
            "run_id": run_id,
            "epoch": 0,
            "rank": rank,
            "host": f"host-{rank}",
            "at_ns": 5,
            "state": "training",
        }
    ]


def ask_at_once(
    collector: Collector, asked: Sequence[tuple[str, list[Row], str]]
) -> list[httpx.Response]:
    """Post rows to tables with these tokens, all at the same time."""

    async def all_of_them() -> list[httpx.Response]:
        async with collector.visitor() as visitor:

            async def one(table: str, rows: list[Row], token: str) -> httpx.Response:
                return await visitor.post(
                    f"/v1/rows/{table}",
                    json={"schema": 1, "rows": rows},
                    headers={"authorization": f"Bearer {token}"},
                )

            return await asyncio.gather(*(one(*what) for what in asked))

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("tokens")
    return tokens_for(
        folder, ours=(Role.INGEST, ""), theirs=(Role.INGEST, ""), narrow=(Role.INGEST, "other-")
    )


def test_each_sender_gets_the_answer_for_its_own_rows(
    store: Store, run_id: str, tokens: tuple[Any, dict[str, str]]
) -> None:
    """Another owner's run, a deleted run, a token for other runs and a bad row, among good ones."""
    book, by_holder = tokens
    good = [
        ("heartbeats", beats_of(run_id, rank), by_holder["ours"]) for rank in range(NUM_HOSTS // 4)
    ]
    bad = [
        ("heartbeats", beats_of(run_id, 1_000), by_holder["theirs"]),
        ("heartbeats", beats_of(f"{run_id}-gone", 0), by_holder["ours"]),
        ("heartbeats", beats_of(run_id, 1_001), by_holder["narrow"]),
        ("heartbeats", [{"run_id": run_id}], by_holder["ours"]),
    ]
    is_deleted = f"{run_id}-gone".__eq__
    with serving(store, tokens=book, is_deleted=is_deleted) as collector:
        # GIVEN a run of our own
        (first,) = ask_at_once(collector, good[:1])
        answers = ask_at_once(collector, [*good[1:], *bad])

    statuses = [answer.status_code for answer in (first, *answers)]
    assert statuses == [200] * len(good) + [409, 410, 403, 422]
    rows = store.rows(
        "SELECT rank FROM heartbeats WHERE startsWith(run_id, {run_id:String}) ORDER BY rank",
        {"run_id": run_id},
    )
    assert [row["rank"] for row in rows] == list(range(len(good)))
