from __future__ import annotations

from rankscope.dashboard.address import View
from rankscope.dashboard.pages import health
from rankscope.dashboard.records.page_results import Health, HealthSection
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import rendered, words


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

    page = rendered(health.PAGE, provider, View(page="health"))

    shown = words(page)
    assert "One thing needs attention. | The loop tail fails." in shown
    assert shown.endswith("tail | fails | upkeep | works")
    assert str(page).count("attention'") == 2  # both cells of the loop that fails


def test_a_server_that_is_well_says_so() -> None:
    well = FakeProvider(state_of_server=Health(problems=(), sections=()))

    assert "The server is well." in words(rendered(health.PAGE, well, View()))
    assert "No data because" in words(rendered(health.PAGE, FakeProvider(), View()))


def test_a_section_with_sentences_is_wide_and_marks_its_names_only() -> None:
    section = HealthSection(
        title="Host checks",
        about="Newest.",
        columns=("host", "what is wrong"),
        rows=(("gpu07", "a GPU is lost"), ("gpu08", "swap is used")),
        bad=frozenset({"gpu07"}),
        texts=frozenset({"what is wrong"}),
    )
    provider = FakeProvider(state_of_server=Health(problems=(), sections=(section,)))

    page = rendered(health.PAGE, provider, View(page="health"))

    assert str(page).count("attention'") == 1
    assert words(page).endswith("gpu07 | a GPU is lost | gpu08 | swap is used")
