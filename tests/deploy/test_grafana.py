"""Provisioning of Grafana: its data source, and the statement of each panel, run."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.deploy.files import DEPLOY, SERVER_XML, USERS_XML, services, texts, xml
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

GRAFANA = DEPLOY / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "rankscope.json").read_text(encoding="utf-8"))
MACROS = {
    "$__fromTime": "toDateTime(1700000000)",
    "$__toTime": "toDateTime(1800000000)",
    "${run:sqlstring}": "'job'",
}


def statements() -> dict[str, str]:
    found = {panel["title"]: panel["targets"][0]["rawSql"] for panel in DASHBOARD["panels"]}
    (variable,) = DASHBOARD["templating"]["list"]
    return found | {"run": variable["query"]}


@pytest.fixture(scope="module", autouse=True)
def _stored_run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Store a run of two ranks and three steps."""
    spool = tmp_path_factory.mktemp("spool")
    for rank in range(2):
        builder = SpoolBuilder(spool, run_id="job", rank=rank)
        for step in range(3):
            builder.span("forward", step=step, start_ns=step * 10**9)
            builder.step(step, start_ns=step * 10**9, duration_ns=5 * 10**8)
        builder.end()
    SpoolTail(spool, StoreWriter(store)).poll()


def run(store: Store, title: str) -> list[dict[str, Any]]:
    sql = statements()[title]
    for macro, value in MACROS.items():
        sql = sql.replace(macro, value)
    assert "$" not in sql, "a macro or variable without a value"
    return store.rows(sql)


@pytest.mark.slow
@pytest.mark.parametrize("title", sorted(statements()))
def test_every_statement_runs(store: Store, title: str) -> None:
    run(store, title)


def test_the_panels_show_the_values_of_the_run(store: Store) -> None:
    (listed,) = run(store, "Runs")
    assert (listed["run_id"], listed["ranks"]) == ("job", 2)
    assert [row["step_time"] for row in run(store, "Step time")] == [0.5, 0.5, 0.5]
    assert run(store, "Is everything there?") == [
        {"spans": 6, "torn": 0, "set_aside": 0, "dropped": 0}
    ]
    assert run(store, "run") == [{"run_id": "job"}]


def test_the_data_source_is_the_reader_at_the_servers_port() -> None:
    document = yaml.safe_load((GRAFANA / "datasources" / "rankscope.yaml").read_text())
    (source,) = document["datasources"]
    settings = source["jsonData"]

    assert settings["username"] in {one.tag for one in xml(USERS_XML).iterfind("users/*")}
    assert [str(settings["port"])] == texts(xml(SERVER_XML), "http_port")
    assert settings["protocol"] == "http"
    for profile in ("single", "cluster"):
        names = set(services(profile)) | {
            alias
            for one in services(profile).values()
            for network in (one.get("networks") or {}).values()
            for alias in network["aliases"]
        }
        assert settings["host"] in names
    (variable,) = re.findall(r"^\$(\w+)$", source["secureJsonData"]["password"])
    assert variable in services()["grafana"]["environment"]


def test_every_panel_uses_the_provisioned_source_and_has_a_description() -> None:
    document = yaml.safe_load((GRAFANA / "datasources" / "rankscope.yaml").read_text())
    known = {source["uid"]: source["type"] for source in document["datasources"]}

    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert known[target["datasource"]["uid"]] == target["datasource"]["type"]
        assert panel["description"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_folder_of_the_dashboards_is_the_mounted_one() -> None:
    document = yaml.safe_load((GRAFANA / "dashboards" / "rankscope.yaml").read_text())
    (provider,) = document["providers"]

    volumes = services()["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in volumes
