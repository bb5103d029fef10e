"""Provisioning of Grafana: its data source, and the statement of each panel, run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.deploy.files import DEPLOY, SERVER_XML, USERS_XML, services, texts, xml
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.missing_tools import skip_for_missing
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

GRAFANA = DEPLOY / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "rankscope.json").read_text(encoding="utf-8"))
METRICS = json.loads((GRAFANA / "dashboards" / "metrics.json").read_text(encoding="utf-8"))
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
    (source, _) = document["datasources"]
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

    for dashboard in (DASHBOARD, METRICS):
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                assert known[target["datasource"]["uid"]] == target["datasource"]["type"]
            assert panel["description"]
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert DASHBOARD["uid"] != METRICS["uid"]


def test_each_metric_of_a_panel_is_one_that_the_server_has() -> None:
    expressions = [target["expr"] for panel in METRICS["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"rankscope_(\w+)", text)}
    files = [*(ROOT / "src/rankscope/server").glob("*.py"), ROOT / "collector/http/metrics.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)

    assert len(used) > 15
    for name in used:
        plain = name.removesuffix("_bucket")
        assert f'"{plain}"' in source or f'"rankscope_{plain}"' in source, name


def test_prometheus_parses_the_expression_of_each_panel(tmp_path: Path) -> None:
    found = shutil.which("promtool")
    if found is None:
        skip_for_missing("there is no promtool: run tests/deploy/install_servers.sh")
    rules = [
        {"record": f"panel_{panel['id']}_{target['refId']}", "expr": target["expr"]}
        for panel in METRICS["panels"]
        for target in panel["targets"]
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    done = subprocess.run(
        [found, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )

    assert f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr


def test_the_folder_of_the_dashboards_is_the_mounted_one() -> None:
    document = yaml.safe_load((GRAFANA / "dashboards" / "rankscope.yaml").read_text())
    (provider,) = document["providers"]

    volumes = services()["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in volumes
