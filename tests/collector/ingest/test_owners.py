from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.tokens import Role
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN, serving, tokens_for
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.collector.stored import names_of, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

pytestmark = pytest.mark.slow

NOW_NS = 10**18
"""Time of the tokens and of the service."""


@pytest.fixture
def by() -> dict[str, str]:
    """Return the tokens by holder; `collector` adds them."""
    return {}


@pytest.fixture
def collector(store: Store, tmp_path: Path, by: dict[str, str]) -> Iterator[Collector]:
    holders = {
        "team": (Role.INGEST, ""),
        "other": (Role.INGEST, ""),
        "llama": (Role.INGEST, "llama-"),
        "reader": (Role.READ, "mistral-"),
    }
    book, tokens = tokens_for(tmp_path, **holders)
    by |= tokens
    with serving(store, tokens=book, unix_ns=lambda: NOW_NS) as served:
        yield served


def store_own_spool(store: Store, folder: Path, run_id: str) -> None:
    spool = SpoolBuilder(folder, run_id=run_id)
    spool.span("own")
    spool.end()
    SpoolTail(folder, StoreWriter(store)).poll()


def test_a_run_of_the_servers_own_spool_takes_nothing_of_a_token(
    store: Store, run_id: str, tmp_path: Path, collector: Collector, by: dict[str, str]
) -> None:
    store_own_spool(store, tmp_path / "spool", run_id)
    row = {"run_id": run_id, "epoch": 0, "state": "failed", "revision": 2**63 - 1}

    assert collector.ship(span_cut(run_id, 0, 3), token=by["other"]).status_code == 409
    assert collector.rows("runs", [row], token=by["other"]).status_code == 409
    assert collector.resume(run_id=run_id, token=by["other"]).status_code == 409
    assert collector.rows("runs", [row]).status_code == 200  # the server's own token

    assert names_of(store, run_id) == ["own"]


def test_the_owner_of_the_servers_spool_can_be_named(
    store: Store, run_id: str, tmp_path: Path, collector: Collector, by: dict[str, str]
) -> None:
    SpoolBuilder(tmp_path / "spool", run_id=run_id).span("own")
    SpoolTail(tmp_path / "spool", StoreWriter(store, owner="team")).poll()

    assert collector.ship(span_cut(run_id, 0, 3), token=by["team"]).status_code == 200
    assert collector.ship(span_cut(run_id, 3, 6), token=by["other"]).status_code == 409


def test_a_simulated_or_imported_run_takes_nothing_of_a_token(
    store: Store, run_id: str, collector: Collector, by: dict[str, str]
) -> None:
    store.insert_rows("runs", [{"run_id": run_id, "epoch": 0, "source_format": "simulation"}])

    assert collector.ship(span_cut(run_id, 0, 3), token=by["team"]).status_code == 409
    assert shown(store, run_id) == []


def test_a_taken_name_does_not_keep_the_servers_own_spool_out(
    store: Store, run_id: str, tmp_path: Path, collector: Collector, by: dict[str, str]
) -> None:
    collector.ship(span_cut(run_id, 0, 3), token=by["other"])

    store_own_spool(store, tmp_path / "spool", run_id)

    assert names_of(store, f"{run_id}-2") == ["own"]
    assert shown(store, run_id) == ["s0", "s1", "s2"]


def test_what_the_servers_own_token_stores_is_the_servers(
    store: Store, run_id: str, collector: Collector, by: dict[str, str]
) -> None:
    collector.ship(span_cut(run_id, 0, 3), token=OWN)

    assert collector.ship(span_cut(run_id, 3, 6), token=by["team"]).status_code == 409
    assert collector.ship(span_cut(run_id, 3, 6), token=OWN).status_code == 200


def test_reading_what_is_stored_of_a_run_does_not_claim_it(
    run_id: str, collector: Collector, by: dict[str, str]
) -> None:
    assert collector.resume(run_id=run_id, token=by["other"]).status_code == 200
    assert collector.ship(span_cut(run_id, 0, 3), token=by["team"]).status_code == 200
    assert collector.resume(run_id=run_id, token=by["team"]).status_code == 200
    assert collector.resume(run_id=run_id, token=by["other"]).status_code == 409


@pytest.mark.parametrize("revision", [2**63 - 1, NOW_NS + 1])
def test_a_revision_of_the_future_does_not_pin_a_row(
    store: Store, run_id: str, collector: Collector, by: dict[str, str], revision: int
) -> None:
    row = {"run_id": run_id, "epoch": 0, "state": "failed", "revision": revision}
    collector.rows("runs", [row], token=by["team"])

    later = {**row, "state": "running", "revision": NOW_NS + 1}
    collector.rows("runs", [later], token=by["team"])

    assert StoreSource(store).run_info(run_id).epochs[0].epoch == 0
    (known,) = (run for run in StoreSource(store).runs() if run.run_id == run_id)
    assert known.state == "running"


def test_the_clock_of_a_host_has_an_owner(
    store: Store, run_id: str, collector: Collector, by: dict[str, str]
) -> None:
    row = {"host": run_id, "boot_id": "ab", "at_ns": 5, "offset_ns": 7}
    own = {**row, "host": f"{run_id}-server"}
    store.insert_rows("clock", [own])

    assert collector.rows("clock", [row], token=by["team"]).status_code == 200
    for known in (row, own):
        forged = {**known, "at_ns": 9, "offset_ns": 10**9}
        assert collector.rows("clock", [forged], token=by["other"]).status_code == 409
    assert collector.rows("clock", [{**row, "at_ns": 6}], token=by["team"]).status_code == 200


def test_the_prefix_of_a_token_reserves_its_names(
    run_id: str, collector: Collector, by: dict[str, str]
) -> None:
    reserved, free = f"llama-{run_id}", f"mistral-{run_id}"

    assert collector.ship(span_cut(reserved, 0, 3), token=by["other"]).status_code == 403
    assert collector.ship(span_cut(reserved, 0, 3), token=by["llama"]).status_code == 200
    # A prefix of a token that cannot write reserves nothing.
    assert collector.ship(span_cut(free, 0, 3), token=by["other"]).status_code == 200
