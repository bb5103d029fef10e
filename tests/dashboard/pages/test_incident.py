from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_device_hours
from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import incident as page
from rankscope.dashboard.pages.incident import fix_sentence, state_sentence
from rankscope.dashboard.records.alert_list import AlertState
from rankscope.dashboard.records.incident import (
    Circumstance,
    Fix,
    FixOutcome,
    Incident,
    IncidentState,
    IncidentView,
    Moment,
    ShownNote,
)
from rankscope.dashboard.records.rank_details import HostFinding
from tests.dashboard.pages.test_alerts import OPEN
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import rendered, words
from tests.support.dashboard.posts import page_post, post

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.alert_list import ShownAlert

FIX = Fix(
    outcome=FixOutcome.VERIFIED,
    first_step=20,
    num_before=10,
    num_after=10,
    num_needed=5,
    before_s=0.46,
    after_s=0.338,
    margin_s=0.004,
    usual_s=0.34,
)
INCIDENT = Incident(
    run="demo-42",
    number=0,
    cause="slow-compute",
    severity="critical",
    ranks=(5,),
    hosts=("gpu-7",),
    evidence="rank 5 computes 1.8 x as long as its peers",
    confidence=0.98,
    state=IncidentState.ONGOING,
    onset=Moment(epoch=0, step=10, at_ns=1_790_000_000_000_000_000),
    last=Moment(epoch=0, step=29, at_ns=1_790_000_600_000_000_000),
    checked_step=29,
    opened_ns=1_790_000_060_000_000_000,
    closed_ns=None,
    saved_s=0.122,
    lost_device_h=0.005422,
    fix=None,
    restarted=None,
    came_back_from=None,
    came_back_as=None,
    before_onset=(),
    history=(),
    follows="",
    notes=(),
)


def view_of(
    incident: Incident, *, alert: ShownAlert | None = None, may_change: bool = True
) -> IncidentView:
    found = replace(report().findings[0], severity=Severity.CRITICAL)
    return IncidentView(incident=incident, finding=found, alert=alert, may_change=may_change)


def shown(view: IncidentView, number: str = "0") -> Component:
    made = report()
    made = replace(
        made,
        findings=(replace(made.findings[0], severity=Severity.CRITICAL), *made.findings[1:]),
    )
    provider = FakeProvider(reports={"demo-42": made}, incident_views={0: view})
    return rendered(page.PAGE, provider, View(page="incident", run="demo-42", show=number))


def test_the_page_answers_what_since_when_at_what_cost_and_what_to_do() -> None:
    text = words(shown(view_of(INCIDENT)))

    assert "slow-compute · ongoing" in text
    assert "Rank 5 computes 1.80x slower than its peers" in text
    assert "Ongoing since step 10." in text
    assert "step 10 | 2026-09-21" in text
    assert "10 min 0 s after the onset" in text
    assert "0.00542 GPU-hours | 122 ms in each of 20 steps, times the ranks of the job" in text
    order = ("onset", "last seen", "cost so far", "Proof", "What to do", "Before the onset",
             "History of gpu-7", "Acknowledgement and notes")  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Verified: 460 to 338 ms since step 20 (122 ms ± 4.00 ms less, 98 % interval)."),
        (
            {"outcome": FixOutcome.TOO_FEW, "num_after": 2},
            "Not verified yet: 2 of 5 steps since step 20.",
        ),
        (
            {"outcome": FixOutcome.TOO_FEW, "num_before": 3},
            "Not verified: 3 steps showed it, and 5 are needed.",
        ),
        (
            {"outcome": FixOutcome.NOT_BETTER, "after_s": 0.463},
            "Not better: 460 to 463 ms since step 20 (3.00 ms ± 4.00 ms more, 98 % interval).",
        ),
    ],
)
def test_a_fix_is_verified_with_an_interval_or_says_why_not(
    changes: dict[str, Any], sentence: str
) -> None:
    assert fix_sentence(replace(FIX, **changes)) == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Ongoing since step 10."),
        ({"state": IncidentState.OPEN_AT_END}, "Open at the end of the run since step 10."),
        ({"state": IncidentState.ENDED_RUN}, "It ended the run in step 29."),
        ({"state": IncidentState.ENDED_RUN, "last": None}, "It ended the run."),
        (
            {
                "state": IncidentState.ENDED,
                "onset": None,
                "restarted": Moment(epoch=2, step=31, at_ns=None),
            },
            "It ended the job, which trains again in epoch 2, from step 31 on.",
        ),
        ({"state": IncidentState.ENDED}, "Ended after step 29."),
    ],
)
def test_the_state_is_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert state_sentence(replace(INCIDENT, **changes)) == sentence


def test_what_changed_before_and_the_history_of_the_host_are_tables() -> None:
    incident = replace(
        INCIDENT,
        came_back_from=2,
        before_onset=(
            Circumstance(kind="restart", text="epoch 1 began", step=9, num_steps_before=1),
            Circumstance(kind="compile", text="<b>x</b> (rank 5)", step=10, num_steps_before=0),
        ),
        history=(
            HostFinding(
                run_id="old", number=3, cause="gc-pause", ranks=(4,), steps=(1, 2), opened_ns=0
            ),
        ),
        follows="it follows the host: gpu-7",
    )

    made = shown(view_of(incident))

    text = words(made)
    assert "restart | epoch 1 began | 1 step" in text
    assert "same step" in text
    assert "<b>x</b>" in text  # as text, which React escapes
    assert "It follows the host: gpu-7." in text
    assert "/run/old/incident/3" in str(made)
    assert "/run/demo-42/incident/2" in str(made)


def test_notes_are_shown_as_text_with_author_and_time() -> None:
    hostile = "<script>alert(1)</script>\nsecond\u202e line"
    notes = (ShownNote(at_ns=1_790_000_000_000_000_000, by="ana <b>", text=hostile),)

    made = shown(view_of(replace(INCIDENT, notes=notes)))

    text = words(made)
    assert "1 note" in text
    assert "ana <b>" in text
    assert "<script>alert(1)</script> | second\\u{202e} line" in text
    assert "dangerously" not in str(made).lower()


def test_who_may_only_read_gets_neither_buttons_nor_a_form() -> None:
    writer, reader = (
        words(shown(view_of(INCIDENT, may_change=may, alert=OPEN))) for may in (True, False)
    )

    assert "Acknowledge |" in writer
    assert "Add note" in writer
    assert "Add note" not in reader
    assert "Its alert (1a2b3c4d) is open." in reader


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (AlertState.ACKNOWLEDGED, "is acknowledged by ana."),
        (AlertState.SILENCED, "is silenced, acknowledged by ana."),
    ],
)
def test_the_alert_says_who_takes_care_of_it(state: AlertState, sentence: str) -> None:
    taken = replace(OPEN, state=state, acknowledged_by="ana")

    assert sentence in words(shown(view_of(INCIDENT, alert=taken)))


def test_a_resolved_alert_can_be_neither_acknowledged_nor_silenced() -> None:
    over = replace(OPEN, state=AlertState.RESOLVED)

    active, resolved = (words(shown(view_of(INCIDENT, alert=alert))) for alert in (OPEN, over))

    assert "Acknowledge | Silence | 1 hour" in active
    assert "Silence" not in resolved


def test_an_unknown_number_is_explained() -> None:
    for number in ("7", "x", "9" * 40):
        text = words(shown(view_of(INCIDENT), number))

        assert "has no incident" in text
        assert "numbered from 0" in text


def test_without_a_number_the_incidents_of_the_run_are_listed() -> None:
    provider = FakeProvider(reports={"demo-42": report()}, incident_views={0: view_of(INCIDENT)})

    made = rendered(page.PAGE, provider, View(page="incident", run="demo-42"))

    assert "Incidents of run demo-42" in words(made)
    assert "/run/demo-42/incident/0" in str(made)
    empty = FakeProvider(reports={"demo-42": report()})
    assert "No finding that matters" in words(
        rendered(page.PAGE, empty, View(page="incident", run="demo-42"))
    )


def test_buttons_and_the_form_are_answered_and_a_reader_of_a_post_is_checked() -> None:
    provider = FakeProvider(reports={"demo-42": report()}, incident_views={0: view_of(INCIDENT)})
    client = create_app(provider).server.test_client()
    values = {
        "incident-add.n_clicks": 1,
        "incident-text.value": "drained",
        "incident-author.value": "ana",
        "url.pathname": "/run/demo-42/incident/0",
        "url.search": "",
    }

    assert post(client, page_post(client, values)) == 200
    assert provider.notes == [("demo-42", 0, "drained", "ana")]
    assert post(client, page_post(client, values | {"incident-text.value": 5})) == 400


def test_the_incident_is_a_file_and_an_unknown_one_is_404() -> None:
    provider = FakeProvider(
        reports={"demo-42": report()},
        incident_views={0: view_of(replace(INCIDENT, fix=FIX, state=IncidentState.FIXED))},
    )
    client = create_app(provider).server.test_client()

    answer = client.get("/export/incident.json?run=demo-42&incident=0")

    document = answer.get_json()
    assert document["fix"]["outcome"] == "verified"
    assert document["lost_device_h"] == INCIDENT.lost_device_h
    for query, status in (("run=demo-42&incident=7", 404), ("run=none&incident=0", 404),
                          ("run=demo-42", 400)):  # fmt: skip
        assert client.get(f"/export/incident.json?{query}").status_code == status


def test_a_cost_has_three_digits() -> None:
    costs = [format_device_hours(hours) for hours in (None, 0.0123456, 1234.5)]

    assert costs == ["n/a", "0.0123 GPU-hours", "1,230 GPU-hours"]
