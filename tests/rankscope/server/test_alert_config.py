from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Severity
from rankscope.errors import BadInputError
from rankscope.server.alert_config import AlertConfig, read_alert_config

if TYPE_CHECKING:
    from pathlib import Path

FULL = """\
url = "https://rankscope.example.org"

[rules.mfu-drop]
depth_ratio = 0.2
severity = "warning"

[rules.loss]
enabled = false

[[receivers]]
name = "oncall"
kind = "apprise"
url = "json://127.0.0.1:1"
least_severity = "critical"
rules = ["mfu-drop", "finding"]

[[receivers]]
name = "watchdog"
url = "http://127.0.0.1:1/hook"
heartbeat_s = 60
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "alerts.toml"
    path.write_text(text)
    return path


def test_a_file_sets_rules_and_receivers(tmp_path: Path) -> None:
    config = read_alert_config(write(tmp_path, FULL))

    assert config.url == "https://rankscope.example.org"
    assert config.rules.mfu_drop.depth_ratio == 0.2
    assert config.rules.mfu_drop.severity is Severity.WARNING
    assert config.rules.mfu_drop.num_steps == 3
    assert (config.rules.loss.enabled, config.rules.finding.enabled) == (False, True)
    oncall, watchdog = config.receivers
    assert oncall.wants(rule="mfu-drop", severity="critical")
    assert not oncall.wants(rule="mfu-drop", severity="warning")
    assert not oncall.wants(rule="loss", severity="critical")
    assert watchdog.wants(rule="loss", severity="warning")
    assert watchdog.heartbeat_s == 60.0


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert read_alert_config(write(tmp_path, "")) == AlertConfig()


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        (
            "depth_ratio = 0.2",
            "depht_ratio = 0.2",
            "line 4: rules.mfu-drop.depht_ratio: .*depth_ratio",
        ),
        ("depth_ratio = 0.2", 'depth_ratio = "a"', "line 4: .*depth_ratio: .* a valid number"),
        ("depth_ratio = 0.2", "depth_ratio = 1.2", "line 3: rules.mfu-drop: .*between 0 and 1"),
        ("[rules.loss]", "[rules.los]", "line 7: rules.los: .* lost-records"),
        ("enabled = false", "enabled = 0", "line 8: rules.loss.enabled: .* boolean"),
        ('"warning"\n\n', '"loud"\n\n', "line 5: .*severity: .*'critical', 'warning'"),
        ('"mfu-drop", "f', '"mfu", "f', "line 10: receivers.0: rules has 'mfu'"),
        ("heartbeat_s = 60", "heartbeat_s = 1", "line 17: receivers.1: heartbeat_s must"),
        ("heartbeat_s = 60", "url_file = '/x'", "line 17: receivers.1: give either"),
        ('name = "watchdog"', "", "line 17: receivers.1.name: Field required"),
        ("heartbeat_s = 60", "bearer = 'x'", "line 20: receivers.1.bearer: .* bearer_file"),
        ('name = "watchdog"', 'name = "oncall"', "line 1: the file: receivers: two have"),
        ("[rules.loss]", "[rules.loss", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_line(
    tmp_path: Path, wrong: str, right: str, message: str
) -> None:
    assert wrong in FULL
    with pytest.raises(BadInputError, match=message):
        read_alert_config(write(tmp_path, FULL.replace(wrong, right)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.toml can't be read"):
        read_alert_config(tmp_path / "none.toml")
