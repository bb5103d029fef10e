from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError
from rankscope.collector.errors import RunDeletedError
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import Store, open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.commands.runs import delete_stored
from rankscope.commands.simulate import simulate_run
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages import overview
from rankscope.dashboard.pages import timeline as timeline_page
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.simulation import SimulateOptions
from rankscope.sources.store_source import StoreSource
from tests.integration.test_serve import Job
from tests.support.dashboard.page_text import rendered, words
from tests.support.receiver import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path


def stored(store: Store, folder: Path, run_id: str = "job") -> None:
    """Store a run of two ranks and four steps."""
    job = Job(folder, run_id=run_id)
    job.record_steps(4)
    job.end()
    SpoolTail(folder, StoreWriter(store), grace_ns=0).poll()


@pytest.mark.slow
def test_the_command_deletes_a_run_and_counts_its_rows(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        stored(store, tmp_path / "spool")

    line = delete_stored("job", as_json=False, store_url=url)

    assert line.startswith("deleted run 'job': 16 spans, ")
    with open_store(url) as store:
        assert StoreSource(store).runs() == ()
        with pytest.raises(DeletedRunError, match="was deleted"):
            StoreSource(store).run_info("job")
    again = json.loads(delete_stored("job", as_json=True, store_url=url))
    assert (again["run"], again["num_rows"]) == ("job", {})


@pytest.mark.slow
def test_a_run_with_only_spans_can_be_deleted(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        store.insert_rows("spans", [{"run_id": "job", "row": 0}])

    assert delete_stored("job", as_json=False, store_url=url).startswith(
        "deleted run 'job': 1 spans,"
    )


@pytest.mark.slow
def test_the_error_for_an_unknown_run_names_the_known_runs(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        stored(store, tmp_path / "spool")

    with pytest.raises(UnknownRunError, match="runs: job"):
        delete_stored("jop", as_json=False, store_url=url)
    with pytest.raises(UnknownRunError):
        delete_stored("a b", as_json=False, store_url=url)


@pytest.mark.slow
def test_the_name_of_a_deleted_run_cannot_be_used_again(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        stored(store, tmp_path / "spool")
        Deletions(store).delete("job")

    options = SimulateOptions(scenario="healthy", run_id="job", num_steps=1, store_url=url)
    with pytest.raises(RunDeletedError, match="choose another name"):
        simulate_run(options)


@pytest.mark.slow
def test_pages_of_a_run_that_is_deleted_say_so(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        # GIVEN pages of a run
        stored(store, tmp_path / "spool")
        source = StoreSource(store)
        reports = Reports(source)
        provider = StoreProvider(source, reports, store=store, timeout_s=TIMEOUT_S)
        view = View(page=TIMELINE, run="job", epoch=0, step=1)
        assert "deleted" not in words(rendered(overview.PAGE, provider, View(run="job")))
        assert "deleted" not in words(rendered(timeline_page.PAGE, provider, view))
        seen = provider.revision("job")

        # WHEN it is deleted and the next analysis has run
        Deletions(store).delete("job")
        reports.keep_only({run.run_id for run in source.runs()})

        # THEN each page says so, and does not change any more
        gone = provider.revision("job")
        assert gone != seen
        for page in (
            rendered(overview.PAGE, provider, View(run="job")),
            rendered(timeline_page.PAGE, provider, view),
        ):
            assert "No data because run 'job' was deleted" in words(page)
        assert provider.revision("job") == gone
