from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.report.report import Proof, Severity
from rankscope.collector.store.location import ServerFile
from rankscope.dashboard.address import read_address
from rankscope.terminal.proof_address import format_incident, format_proof
from tests.support.dashboard.builders import report

SERVER = ServerFile(pid=1, url="http://127.0.0.1:8050/", token="secret")
PROOF = Proof(epoch=0, step=12, rank=5, begin_ns=100, end_ns=200, excess_ns=50)


def test_the_proof_of_the_top_finding_is_an_address_of_the_server_that_runs() -> None:
    made = report()
    (top, *rest) = made.findings
    proved = replace(made, findings=(replace(top, proof=PROOF), *rest))

    address = format_proof(proved, SERVER)

    path, _, query = address.removeprefix("http://127.0.0.1:8050").partition("?")
    view = read_address(path, query)
    assert (view.page, view.run, view.step, view.ranks) == ("timeline", made.run, 12, top.ranks)
    assert "secret" not in address


def test_without_a_server_it_is_the_command_that_opens_it() -> None:
    text = format_proof(report(), None)

    assert text == f"rankscope serve, then /run/{report().run} behind the address that it prints"


def test_nothing_is_to_be_proved_of_a_healthy_run() -> None:
    made = report(slow_rank=None)
    healthy = replace(made.top_finding, severity=Severity.NONE)

    assert format_proof(replace(made, findings=(healthy,)), SERVER) == ""


def test_an_incident_has_an_address_and_without_a_number_none() -> None:
    assert format_incident("job", 3, SERVER) == "http://127.0.0.1:8050/run/job/incident/3"
    assert "/run/job/incident/3" in format_incident("job", 3, None)
    assert format_incident("job", None, SERVER) == ""
