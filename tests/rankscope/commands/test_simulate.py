"""`rankscope simulate`, from the flags to the rows in the store and the files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.__main__ import main
from rankscope.analysis.trace.account import RecordAccount
from rankscope.collector.arrow_columns import to_numpy
from rankscope.collector.errors import RunExistsError
from rankscope.collector.read.runs import read_events, read_run, read_run_names
from rankscope.collector.read.samples import read_samples
from rankscope.collector.read.spans import read_spans
from rankscope.collector.read.steps import read_microbatches, read_steps
from rankscope.commands.simulate import format_label
from rankscope.errors import BadInputError
from rankscope.simulation import SimulateOptions, build_scenario, store_simulation, write_files
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import NONE
from rankscope.trainer.errors import ScenarioError
from rankscope.trainer.simulator.simulation import simulate
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables


def small(run_id: str, name: str = "slow-compute") -> Simulation:
    return simulate(preset_scenario(name, num_steps=3, num_microbatches=4), run_id=run_id)


@pytest.mark.slow
def test_a_stored_run_holds_all_rows_of_the_simulation(store: Store) -> None:
    simulation = small("whole")

    done = store_simulation(store, simulation, simulation.tables())

    recorded = list(simulation.tables())
    spans = read_spans(store, "whole")
    assert spans.num_rows == done.num_spans == sum(one.spans.num_rows for one in recorded)
    for column in ("start_ns", "duration_ns", "group_id", "seq", "src_rank", "flags"):
        expected = np.concatenate([to_numpy(one.spans[column]) for one in recorded])
        assert np.array_equal(np.sort(to_numpy(spans[column])), np.sort(expected))
    assert read_steps(store, "whole").num_rows == 3 * 16
    assert read_microbatches(store, "whole").num_rows == 3 * 16 * 4
    stored = spans.num_rows + 3 * 16 + 3 * 16 * 4
    # Its cuts have several ranks, so there is one account for all, and nothing counted the records.
    accounts = StoreSource(store).run_info("whole").accounts
    assert accounts == {(0, NONE): RecordAccount(stored=stored)}
    samples = read_samples(store, "whole", first_ns=0, last_ns=2**62)
    assert samples.num_rows == 3 * 16 * 6


def test_a_stored_run_is_described_like_a_traced_one(store: Store) -> None:
    simulation = small("described", "misconfiguration")
    store_simulation(store, simulation, simulation.tables())

    rows = read_run(store, "described")
    hashes = [row["manifest_hash"] for row in rows.ranks]

    assert (rows.epochs[0]["state"], rows.epochs[0]["world_size"]) == ("ended", 16)
    assert [row["rank"] for row in rows.ranks] == list(range(16))
    assert (rows.ranks[5]["host"], rows.ranks[5]["rack"], rows.ranks[5]["rail"]) == (
        "sim-00001", "rack-0000", "rail-1",
    )  # fmt: skip
    assert len(rows.groups) == len(simulation.groups)
    assert rows.account[0]["num_spans"] == sum(one.spans.num_rows for one in simulation.tables())
    assert [rank for rank in range(16) if hashes[rank] != hashes[0]] == [9]


def test_the_end_of_a_run_is_stored(store: Store) -> None:
    simulation = simulate(preset_scenario("crash", num_steps=4), run_id="crashed")
    store_simulation(store, simulation, simulation.tables())

    rows, events = read_run(store, "crashed"), read_events(store, "crashed")

    assert rows.epochs[0]["state"] == "failed"
    assert {row["exit_state"] for row in rows.ranks} == {"failed"}
    assert len(events) == 16
    assert events[0]["rank"] == 9
    assert json.loads(events[0]["data"])["exception"]["type"] == "torch.OutOfMemoryError"


def test_a_name_that_is_in_use_is_refused(store: Store) -> None:
    simulation = small("taken")
    store_simulation(store, simulation, simulation.tables())

    with pytest.raises(RunExistsError, match="choose another --run name"):
        store_simulation(store, small("taken", "healthy"), ())


@pytest.mark.slow
def test_an_interrupted_run_is_not_listed_and_can_be_stored_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.simulation.INSERT_ROWS", 1)  # each step by itself
    simulation = small("short")

    def interrupted() -> Iterator[StepTables]:
        yield next(simulation.tables())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_simulation(store, simulation, interrupted())
    assert read_spans(store, "short").num_rows > 0
    assert "short" not in read_run_names(store)

    done = store_simulation(store, simulation, simulation.tables())

    assert read_spans(store, "short").num_rows == done.num_spans


def test_the_files_hold_the_columns_of_the_store_and_the_labels(tmp_path: Path) -> None:
    simulation = small("filed")

    done = write_files(simulation, simulation.tables(), folder=tmp_path / "out")

    spans = pq.read_table(tmp_path / "out" / "spans.parquet")
    first = next(simulation.tables()).spans
    assert spans.num_rows == done.num_spans
    assert spans.column_names == first.column_names
    assert to_numpy(spans["start_ns"])[: first.num_rows].tolist() == (
        to_numpy(first["start_ns"]).tolist()
    )
    (label,) = (tmp_path / "out" / "truth.jsonl").read_text().splitlines()
    assert json.loads(label)["ranks"] == [9]
    assert len((tmp_path / "out" / "ranks.jsonl").read_text().splitlines()) == 16
    with pytest.raises(BadInputError, match="is not an empty folder"):
        write_files(simulation, (), folder=tmp_path / "out")


def test_flags_replace_settings_of_the_scenario_and_add_faults() -> None:
    scenario = build_scenario(
        SimulateOptions(
            scenario="slow-compute",
            run_id="r",
            num_ranks=64,
            seed=7,
            num_steps=9,
            pp=4,
            faults=("host-stall:rank=63,ms=2", "none"),
        )
    )

    assert (scenario.world_size, scenario.dp, scenario.pp, scenario.tp) == (64, 8, 4, 2)
    assert (scenario.seed, scenario.num_steps) == (7, 9)
    assert [str(fault) for fault in scenario.faults] == [
        "slow-compute:rank=33,factor=1.5,steps=3-8",
        "host-stall:rank=63,ms=2",
    ]


def test_the_faults_of_a_file_are_checked_against_the_sizes_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('dp = 2\npp = 1\nfaults = ["slow-compute:rank=5,factor=2"]\n')

    grown = build_scenario(SimulateOptions(scenario=str(path), run_id="r", num_ranks=8))

    assert (grown.dp, str(grown.faults[0])) == (8, "slow-compute:rank=5,factor=2")
    with pytest.raises(ScenarioError, match="rank 5 does not exist"):
        build_scenario(SimulateOptions(scenario=str(path), run_id="r"))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("slow-comput --run r", "no scenario 'slow-comput': use a .toml or .json file"),
        ("healthy --run r --ranks 7", "--ranks 7 must be a multiple of pp x tp x cp = 4"),
        ("healthy --run r --ranks 16 --dp 2", "--ranks 16 needs --dp 4, got --dp 2"),
        ("healthy --run r --fault slow-compute:rank=99,factor=2", "rank 99 does not exist"),
        ("healthy --run r --fault slow-compute:rank=1", "'factor' is missing"),
        ("healthy --run -r-", "run name '-r-'"),
        ("gone.toml --run r", "cannot read gone.toml"),
        ("healthy", "Missing option '--run'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    flags: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope", "simulate", *flags.split()])

    status = main()

    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert line in output.err
    assert output.err.count("\n") == 1


def test_the_command_prints_the_labels_as_text_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rankscope", "simulate", "slow-link", "--run", "r", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "text")])
    assert main() == 0
    text = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "json"), "--json"])
    assert main() == 0
    document = json.loads(capsys.readouterr().out)

    assert text.out.splitlines()[1] == "fault: slow-link on ranks 2 and 4, steps 1 to 2, factor 10"
    assert "step 1 of 3, 16 ranks: simulating" in text.err
    assert (document["world_size"], document["num_steps"]) == (16, 3)
    assert document["truth"][0]["cause"] == "slow-link"
    assert document["truth"][0]["ranks"] == [2, 4]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gc-pause", "fault: gc-pause, steps 0 to 23, + 250 ms, as spans"),
        ("stage-imbalance", "fault: stage-imbalance on ranks 4 to 7, steps 0 to 23, factor 1.4"),
        ("hang", "fault: hang on rank 5, steps 12 to 12"),
    ],
)
def test_a_label_is_one_line(name: str, line: str) -> None:
    (label,) = simulate(preset_scenario(name, dp=2)).labels

    assert format_label(label) == line
