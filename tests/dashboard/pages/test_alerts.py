from __future__ import annotations

import re
from dataclasses import replace

from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import alerts
from rankscope.dashboard.records.alert_list import AlertList, AlertState, ShownAlert, ShownSilence
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import rendered, words
from tests.support.dashboard.posts import UPDATE_PATH, page_post

OPEN = ShownAlert(
    name="1a2b3c4d",
    run="job",
    rule="finding",
    cause="slow-compute",
    severity="critical",
    state=AlertState.OPEN,
    steps=(3, 9),
    ranks=(4, 5, 6),
    hosts=("host-a",),
    text="job: slow-compute: rank 5 takes 1.5 x <b>",
    cost="1.20 s per step (20 %)",
    action="swap it; then `nvidia-smi -q`",
    fired="2026-11-23 22:00:00",
    resolved="",
    acknowledged_by="",
    delivery="undelivered",
)
OVER = replace(OPEN, name="5e6f7a8b", state=AlertState.RESOLVED, text="job: over", run="other")
SILENCE = ShownSilence(name="99aa", covers="run job", until="2026-11-24", by="me", reason="known")
LIST = AlertList(alerts=(OPEN, OVER), silences=(SILENCE,), may_change=True)


def page(found: AlertList) -> str:
    return words(rendered(alerts.PAGE, FakeProvider(alert_list=found), View(page="alerts")))


def test_the_page_shows_active_alerts_with_cost_action_and_the_view_that_proves_them() -> None:
    shown = page(LIST)

    assert "job: slow-compute: rank 5 takes 1.5 x" in shown
    assert "costs 1.20 s per step (20 %)" in shown
    assert "do:  | swap it; then  | nvidia-smi -q" in shown
    assert "Proof and what to do" in shown
    assert "a receiver did not get it" in shown
    assert "1 open, 0 acknowledged, 0 silenced, 1 resolved" in shown
    assert "job: over" not in shown
    assert "run job" in shown
    built = str(rendered(alerts.PAGE, FakeProvider(alert_list=LIST), View(page="alerts")))
    assert "/timeline?run=job&step=3&rank=4-6" in built
    assert "href='/run/job'" in built


def test_an_alert_about_a_host_leads_to_the_checks_of_hosts() -> None:
    host = replace(OPEN, run="", rule="bad-host", cause="", steps=None, ranks=())
    built = str(
        rendered(
            alerts.PAGE, FakeProvider(alert_list=AlertList(alerts=(host,))), View(page="alerts")
        )
    )

    assert "href='/health'" in built
    assert "host checks" in built


def test_a_path_of_the_documentation_from_an_older_server_is_not_shown() -> None:
    old = replace(OPEN, action="docs/findings.md#slow-compute")

    assert "docs/" not in page(replace(LIST, alerts=(old,)))


def test_a_clause_has_a_line_of_its_own_and_parentheses_stay_together() -> None:
    text = "rank 1: slow (+79 %, beyond noise; waiting not counted); in steps 3 to 9"

    shown = page(replace(LIST, alerts=(replace(OPEN, text=text),)))

    assert "rank 1: slow (+79 %, beyond noise; waiting not counted) | in steps 3 to 9" in shown


def test_an_action_has_its_commands_as_code_and_its_ranks_as_links() -> None:
    action = "rank 5: look at its ports (`ibstat`, `rdma statistic`), see docs/agent.md"
    found = replace(LIST, alerts=(replace(OPEN, action=action),))

    built = str(rendered(alerts.PAGE, FakeProvider(alert_list=found), View(page="alerts")))

    assert [text for text in re.findall(r"Code\('(.*?)'\)", built) if "alerts" not in text] == [
        "ibstat",
        "rdma statistic",
        "docs/agent.md",
        "99aa",
    ]
    assert built.count("/rank?run=job&rank=5") == 2  # of the text and of the action
    assert "href='docs" not in built


def test_without_alerts_the_page_says_so() -> None:
    assert "No active alert." in page(AlertList())


def test_each_active_alert_has_its_buttons_for_those_who_may_change_it() -> None:
    held = replace(OPEN, name="2b3c4d5e", state=AlertState.ACKNOWLEDGED)
    every = replace(LIST, alerts=(OPEN, held, OVER))

    def buttons(found: AlertList) -> tuple[list[str], list[str]]:
        view = View(page="alerts", show="all")
        built = str(rendered(alerts.PAGE, FakeProvider(alert_list=found), view))
        return re.findall(r"data-alert='(\w+)'", built), re.findall(r"data-hours='(\d+)'", built)

    silences = [*alerts.DURATIONS]
    names = ["1a2b3c4d", *(["1a2b3c4d"] * len(silences))]
    held_names = ["2b3c4d5e"] * len(silences)  # it is acknowledged already
    assert buttons(every) == (names + held_names, silences * 2)
    assert buttons(replace(every, may_change=False)) == ([], [])
    assert "open the URL that  | rankscope serve" in page(replace(every, may_change=False))


def test_the_filter_and_the_changes_are_answered() -> None:
    client = create_app(FakeProvider(alert_list=LIST)).server.test_client()
    change = {"alert": "1a2b3c4d", "number": 1}

    chosen = page_post(client, {"alerts-filter.value": "resolved", "alerts-run.value": ""})
    address = client.post(UPDATE_PATH, json=chosen).get_json()["response"]["url"]["search"]
    assert address == "?show=resolved"
    for more, done in (
        ({}, "acknowledged 1a2b3c4d"),
        ({"hours": "8"}, "silenced 1a2b3c4d for 28800 s"),
        ({"hours": "9999"}, None),
    ):
        posted = page_post(client, {"alerts-change.data": change | more})
        answer = client.post(UPDATE_PATH, json=posted)
        assert answer.status_code == (400 if done is None else 200)
        if done is not None:
            assert answer.get_json()["response"]["alerts-changed"]["children"] == done
