from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from rankscope.collector.read.findings import write_findings
from rankscope.collector.store.store import open_store
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored, watch_stored
from rankscope.commands.app import app
from rankscope.commands.runs import list_findings, list_runs
from rankscope.commands.simulate import simulate_run
from rankscope.errors import BadInputError
from rankscope.simulation import SimulateOptions
from tests.collector.read.test_findings import CRASH, SLOW
from tests.support.rankscope.rollup_runs import describe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_run_is_listed_with_its_worst_open_finding_and_watched_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN an ended run with three recorded findings, the costliest of which is closed
    url = f"chdb://{tmp_path}/store"
    options = SimulateOptions(scenario="slow-compute", run_id="r", num_steps=4, num_ranks=8)
    simulate_run(replace(options, store_url=url))
    with open_store(url) as store:
        closed = replace(SLOW, closed_ns=1, recoverable_ratio=0.9, number=5, cause="gc-pause")
        write_findings(store, [replace(SLOW, recoverable_ratio=0.5), CRASH, closed])

    (header, line) = list_runs(as_json=False, store_url=url).splitlines()
    watch_stored(AnalyzeOptions(run_id="r", store_url=url))
    (analysed,) = json.loads(list_runs(as_json=True, store_url=url))["runs"]

    assert header.split()[-1] == "verdict"
    assert line.endswith("slow-compute on 5, 7")
    # The report that the command made is stored, with its verdict.
    assert analysed["severity"] in {"critical", "warning"}
    assert analysed["verdict"].startswith("Rank ")
    assert capsys.readouterr().out.count("run r: 8 ranks") == 1
    with pytest.raises(BadInputError, match="no rank 8: give one of 0 to 7"):
        analyze_stored(AnalyzeOptions(run_id="r", rank=8, store_url=url))


HEADER = [
    "run",
    "no.",
    "cause",
    "ranks",
    "steps",
    "cost",
    "confidence",
    "opened",
    "closed",
    "follows",
]
TIMES = ("1970-01-01 00:00:00", "2023-11-14 22:13:20")


@pytest.mark.slow
def test_findings_are_listed_with_their_first_and_last_step(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}"
    assert list_findings(None, as_json=False, store_url=url).startswith("no findings:")
    with open_store(url) as store:
        closed = replace(SLOW, closed_ns=1_700_000_000_000_000_000, saved_s=0.31)
        write_findings(store, [closed, CRASH, replace(SLOW, run_id="q")])

    lines = list_findings("r", as_json=False, store_url=url).splitlines()

    assert [re.split(" {2,}", line) for line in lines] == [
        HEADER,
        ["r", "0", "slow-compute", "5, 7", "10-29", "310 ms", "0.95", *TIMES, "-"],
        ["r", "1", "crash", "5, 7", "-", "n/a", "0.95", TIMES[0], "open", "-"],
    ]


def test_on_a_terminal_findings_fit_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"chdb://{tmp_path}"
    with open_store(url) as store:
        name = "a-long-name-of-a-run-as-people-have-it-20261128-101112"
        write_findings(store, [replace(SLOW, run_id=name, cause="network-degradation")])
    monkeypatch.setattr("rankscope.commands.runs.table_width", lambda: 80)

    lines = list_findings(None, as_json=False, store_url=url).splitlines()

    assert max(map(len, lines)) <= 80
    assert "".join(line.split("  ")[0] for line in lines[1:]).replace(" ", "") == name


@pytest.mark.slow
def test_findings_of_all_runs_are_one_json_document(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}"
    with open_store(url) as store:
        write_findings(store, [SLOW, CRASH])

    document = json.loads(list_findings(None, as_json=True, store_url=url))

    assert [found["cause"] for found in document["findings"]] == ["crash", "slow-compute"]
    assert document["findings"][1]["onset_step"] == 10
    assert document["findings"][1]["closed_ns"] is None
    assert document["findings"][1]["follows"] is None


def test_a_run_is_tagged_and_annotated_on_the_command_line(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    with open_store(url) as store:
        describe(store, "r")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["runs", *arguments, "--store", url])
        assert result.exception is None, result.exception
        return result.output

    assert run("tag", "r", "prod") == 'added tag "prod": run r\n'
    run("tag", "r", "night")
    run("untag", "r", "night")
    run("note", "r", "drained node-3")

    (header, line) = run().splitlines()
    assert (header.split()[-1], line.split()[-1]) == ("tags", "prod")
    assert json.loads(run("--json"))["runs"][0]["tags"] == ["prod"]
    assert run("note", "r").splitlines()[-1].endswith("drained node-3")
    run("note", "r", "drained node-3", "--remove")
    assert run("note", "r") == "no notes of run 'r'\n"
    unknown = CliRunner().invoke(app, ["runs", "untag", "r", "prod2", "--store", url])
    assert "has no tag" in str(unknown.exception)
