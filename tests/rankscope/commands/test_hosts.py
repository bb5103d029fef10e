"""`rankscope hosts`: marks of hosts, dry runs, node lists and messages."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.app import app
from rankscope.commands.hosts import parse_end_ns
from rankscope.commands.simulate import simulate_run
from rankscope.errors import BadInputError
from rankscope.simulation import SimulateOptions
from tests.support.receiver import TIMEOUT_S, Receiver

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

HOST = "sim-00001"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a run on two hosts."""
    url = f"chdb://{tmp_path}/store"
    options = SimulateOptions(
        scenario="healthy", run_id="job", num_steps=4, dp=16, pp=1, tp=1, store_url=url
    )
    simulate_run(options)
    return url


def call(*arguments: str, url: str) -> Result:
    return CliRunner().invoke(app, ["hosts", *arguments, "--store", url])


def listed(url: str) -> list[tuple[str, str]]:
    marks = json.loads(call("list", "--json", url=url).stdout)["hosts"]
    return [(mark["host"], mark["mark"]) for mark in marks]


@pytest.mark.slow
def test_excluding_is_a_dry_run_until_it_is_confirmed(url: str) -> None:
    dry = call("exclude", HOST, "--reason", "slow", "--for", "7d", url=url)
    before = listed(url)
    done = call("exclude", HOST, "--reason", "slow", "--for", "7d", "--yes", url=url)
    after = listed(url)
    table = call("list", url=url).stdout

    assert (before, after) == ([], [(HOST, "excluded")])
    assert "dry run" in dry.stdout
    assert "dry run" not in done.stdout
    for output in (dry.stdout, done.stdout):
        assert f"{HOST}: in 1 run: job (ranks 4-7)" in output
        assert f"scontrol update nodename={HOST} state=drain reason='rankscope: slow'" in output
    assert table.splitlines()[1].split()[:2] == [HOST, "excluded"]


@pytest.mark.slow
def test_an_unknown_name_is_said_and_a_host_is_taken_back(url: str) -> None:
    unknown = call("exclude", "sim-1", "--reason", "x", url=url).stdout
    call("exclude", HOST, "--reason", "slow", "--yes", url=url)
    wrong = call("include", "sim-1", "--yes", url=url)
    call("include", HOST, "--yes", url=url)

    assert "sim-1: in no stored run" in unknown
    assert isinstance(wrong.exception, BadInputError)
    assert f"excluded: {HOST}" in str(wrong.exception)
    assert listed(url) == []


@pytest.mark.slow
def test_node_lists_leave_out_excluded_hosts_and_take_spares(url: str, tmp_path: Path) -> None:
    nodes = tmp_path / "hosts.txt"
    nodes.write_text(f"sim-00000 slots=8\n{HOST} slots=8\n")
    call("exclude", HOST, "--reason", "slow", "--yes", url=url)
    call("label", "sim-7", "spare", "--yes", url=url)
    call("label", "sim-00000", "golden", "--yes", url=url)
    marks = listed(url)

    plain = call("hostfile", str(nodes), url=url)
    call("hostfile", str(nodes), "--with-spares", "--out", str(tmp_path / "new"), url=url)
    option = call("slurm", url=url).stdout
    call("label", "sim-7", "none", "--yes", url=url)

    assert marks == [(HOST, "excluded"), ("sim-7", "spare"), ("sim-00000", "golden")]
    assert plain.stdout == "sim-00000 slots=8\n"
    assert f"1 host (--nnodes 1); left out {HOST}" in plain.stderr
    assert (tmp_path / "new").read_text() == "sim-00000 slots=8\nsim-7 slots=8\n"
    assert option == f"--exclude={HOST}\n"
    assert ("sim-7", "spare") not in listed(url)


@pytest.mark.slow
def test_receivers_get_a_message_and_the_report_says_what_is_excluded(url: str) -> None:
    receiver = Receiver()
    call("exclude", HOST, "--reason", "slow", "--yes", "--alert-webhook", receiver.url, url=url)
    posted = json.loads(receiver.bodies.get(timeout=TIMEOUT_S))
    receiver.close()
    options = AnalyzeOptions(run_id="job", first=None, last=None, as_json=True, store_url=url)
    document = json.loads(analyze_stored(options))
    text = analyze_stored(replace(options, as_json=False))

    assert (posted["rule"], posted["hosts"], posted["reason"]) == ("host", [HOST], "slow")
    (excluded,) = document["excluded_hosts"]
    # The simulated run began in the past.
    assert (excluded["host"], excluded["presence"]) == (HOST, "until-restart")
    assert f"{HOST}, excluded at" in text


def test_an_end_is_a_duration_or_a_date() -> None:
    now_ns = time.time_ns()

    assert parse_end_ns(None, None, now_ns=now_ns) is None
    assert parse_end_ns("2h", None, now_ns=now_ns) == now_ns + 7_200 * 10**9
    assert parse_end_ns(None, "2100-01-01", now_ns=now_ns) == 4_102_444_800 * 10**9
    assert parse_end_ns(None, "2100-01-01T02:00+02:00", now_ns=now_ns) == 4_102_444_800 * 10**9


@pytest.mark.parametrize(
    ("duration", "until"), [("x", None), (None, "x"), (None, "2001-01-01"), ("1d", "2100-01-01")]
)
def test_another_end_is_refused(duration: str | None, until: str | None) -> None:
    with pytest.raises(BadInputError):
        parse_end_ns(duration, until, now_ns=time.time_ns())
