"""Rules for Prometheus, checked and run by its own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import yaml

from rankscope.server.run_metrics import GAUGES
from tests.deploy.files import DEPLOY
from tests.support.missing_tools import skip_for_missing
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = DEPLOY / "prometheus"
RULES = FOLDER / "rankscope.rules.yml"


def promtool(arguments: Sequence[str]) -> str:
    found = shutil.which("promtool")
    if found is None:
        skip_for_missing("there is no promtool: run tests/deploy/install_servers.sh")
    done = subprocess.run(
        [found, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert "10 rules found" in promtool(["check", "rules", RULES.name])


def test_the_rules_fire_and_stay_quiet_as_their_tests_say() -> None:
    assert "SUCCESS" in promtool(["test", "rules", "rankscope.test.yml"])


def test_each_metric_of_a_rule_is_one_that_the_server_has() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    used = {
        name
        for group in groups
        for rule in group["rules"]
        for name in re.findall(r"rankscope_(\w+)", rule["expr"])
    }
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/rankscope/server").glob("*.py")
    )
    known = {gauge for gauge, _, _ in GAUGES}

    for name in used - known:
        assert f'"{name}"' in source, name
