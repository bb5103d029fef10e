from __future__ import annotations

from rankscope.dashboard.address import View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages.health import health_page
from rankscope.dashboard.records.page_results import Health, HealthSection
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import words
from tests.support.dashboard.posts import page_post, post


def test_the_problems_come_first_and_their_rows_are_marked() -> None:
    section = HealthSection(
        title="Loops",
        about="Threads.",
        columns=("loop", "state"),
        rows=(("tail", "fails"), ("upkeep", "works")),
        bad=frozenset({"tail"}),
    )
    provider = FakeProvider(
        state_of_server=Health(problems=("The loop tail fails.",), sections=(section,))
    )

    page = health_page(provider, View(page="health"), base_path="/")

    shown = words(page)
    assert "One thing needs attention. | The loop tail fails." in shown
    assert shown.endswith("tail | fails | upkeep | works")
    assert str(page).count("attention'") == 2  # both cells of the loop that fails


def test_a_server_that_is_well_says_so_and_the_page_refreshes() -> None:
    well = FakeProvider(state_of_server=Health(problems=(), sections=()))
    client = create_app(well).server.test_client()
    values = {"health-timer.n_intervals": 1, "fallback-timer.n_intervals": 1}

    assert "The server is well." in words(health_page(well, View(), base_path="/"))
    assert "No data because" in words(health_page(FakeProvider(), View(), base_path="/"))
    assert post(client, page_post(client, values)) == 200
