"""The incident page's data: its proof after the end, its alert, and notes about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI

from rankscope.collector.read.incidents import MAX_NOTE_CHARS, read_notes
from rankscope.collector.retention.deletion import Deletions
from rankscope.dashboard.records.alert_list import AlertState
from rankscope.errors import BadInputError
from rankscope.server.alerting import Alerting
from rankscope.server.finding_tracker import LiveFindings
from rankscope.server.notes import add_note, make_note, note_router
from rankscope.server.page_alerts import NOT_ALLOWED
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from rankscope.sources.stored_reports import StoredReports
from tests.support.collector.asgi import Client
from tests.support.rankscope.incident_runs import analysed, store_run

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

SLOW = "slow-compute:rank=5,factor=1.8"


def provider_of(store: Store, alerting: Alerting | None = None) -> StoreProvider:
    source = StoreSource(store)
    reports = Reports(source, stored=StoredReports(store))
    return StoreProvider(source, reports, store=store, alerting=alerting)


def test_the_proof_stays_when_the_reports_of_a_live_run_no_longer_have_the_finding(
    store: Store,
) -> None:
    # GIVEN a live run whose finding was closed by one server
    store_run(store, "live", f"{SLOW},steps=8-15", num_steps=30)
    report = analysed(store, "live")
    store.command("ALTER TABLE findings DELETE WHERE run_id = 'live' SETTINGS mutations_sync = 1")
    live = LiveFindings(store, say=lambda _: None)
    live.update(report, is_over=False, cost=None)

    # WHEN another server shows it, whose reports do not have it
    shown = provider_of(store).incident("live", 0)

    assert shown is not None
    assert shown.finding is not None
    assert shown.finding.card == report.top_finding.card
    assert shown.finding.saved_s is None  # its price is not that of the steps that are shown now


def test_its_alert_is_found_by_its_number_and_a_page_without_rights_changes_nothing(
    store: Store,
) -> None:
    store_run(store, "alerted", f"{SLOW},steps=8-29", num_steps=30)
    report = analysed(store, "alerted")
    live = LiveFindings(store, say=lambda _: None)
    live.track(report, is_over=False)
    alerting = Alerting(store, page_url=lambda *_: "")
    raised = alerting.evaluate(report, live.of_run("alerted"))
    provider = provider_of(store, alerting)

    shown = provider.incident("alerted", 0)

    assert shown is not None
    assert shown.alert is not None
    assert shown.alert.name in {alert.name for alert in raised}
    assert shown.alert.state is AlertState.OPEN
    assert provider.incident_numbers(report) == (0,)
    # Outside a request of an administrator.
    assert not shown.may_change
    assert provider.add_note("alerted", 0, "text", by="ana") == NOT_ALLOWED
    assert read_notes(store, "alerted", 0) == ()


def test_a_note_is_stored_shown_at_once_and_deleted_with_its_run(store: Store) -> None:
    store_run(store, "noted", f"{SLOW},steps=8-15", num_steps=20)
    analysed(store, "noted")
    provider = provider_of(store)
    before = provider.incident("noted", 0)

    add_note(store, make_note("noted", 0, " drained gpu-7 \n", by="ana"))

    after = provider.incident("noted", 0)
    assert before is not None
    assert after is not None
    assert before.incident.notes == ()
    assert [(note.by, note.text) for note in after.incident.notes] == [("ana", "drained gpu-7")]
    Deletions(store).delete("noted")
    assert read_notes(store, "noted", 0) == ()


@pytest.mark.parametrize("text", ["", "  \n ", "x" * (MAX_NOTE_CHARS + 1)])
def test_an_empty_or_a_long_note_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="a note has 1 to 2,000 characters"):
        make_note("job", 0, text, by="")


def test_the_route_takes_notes_and_refuses_what_it_does_not_know(store: Store) -> None:
    store_run(store, "routed", f"{SLOW},steps=8-15", num_steps=20)
    analysed(store, "routed")
    app = FastAPI()
    app.include_router(note_router(store))
    client = Client(app)
    note = {"run_id": "routed", "number": 0, "text": "seen", "by": "bot"}

    statuses = [
        client.post("/v1/notes", json=note | change).status_code
        for change in ({}, {"number": 9}, {"text": ""}, {"number": -1}, {"more": 1})
    ]

    assert statuses == [200, 404, 422, 422, 422]
    assert [each.text for each in read_notes(store, "routed", 0)] == ["seen"]
