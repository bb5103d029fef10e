"""The frame of pages that show a report: their states, and their refresh."""

from __future__ import annotations

from rankscope.dashboard.address import LINKS, View
from rankscope.dashboard.pages import links
from rankscope.dashboard.records.progress import Activity, AnalysisInProgress, Progress
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import rendered, words

SHOWN = {"run": "tiny", "search": "?run=tiny", "revision": 0}


def text_of(provider: FakeProvider, run: str | None = "tiny") -> str:
    view = View(page=LINKS, run=run)
    return words(rendered(links.PAGE, provider, view))


def in_progress(provider: FakeProvider) -> AnalysisInProgress:
    (run,) = provider.runs()
    return AnalysisInProgress(
        run=run, progress=Progress(activity=Activity.READING), elapsed_s=1.0, steps=None
    )


def test_each_state_has_its_words() -> None:
    provider = FakeProvider(reports={"tiny": analysed_report()})
    assert "None of" in text_of(provider)
    # the newest run, if the address names none
    assert text_of(provider, None) == text_of(provider)
    assert "there is no run 'gone'" in text_of(provider, "gone")
    provider.unfinished["tiny"] = in_progress(provider)
    assert "analysis in progress" in text_of(provider)
    assert "before a step was recorded" in text_of(FakeProvider(reports={"tiny": None}))
    assert "this store holds no runs yet" in text_of(FakeProvider(), None)
