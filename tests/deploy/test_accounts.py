"""Rights, profiles and limits of deploy/clickhouse/users.d, checked by the engine itself.

The embedded engine has only the user `default`, so that user gets the profile and the grants of an
account. The embedded engine lacks one setting of the server
(`settings_constraints_replace_previous`), so what depends on it is not tested: that Grafana may
choose a time below the limit.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

import pytest

from tests.deploy.files import SERVER_XML, USERS_XML, texts, xml
from tests.deploy.one_node import CONFIGURATION

if TYPE_CHECKING:
    from pathlib import Path

READER, WRITER = "rankscope_reader", "rankscope"

PROGRAM = """
import json, sys
import clickhouse_connect
path, configuration = sys.argv[1:]
client = clickhouse_connect.get_client(
    interface="chdb", path=path, chdb_options={"config-file": configuration}
)
answers = []
for statement in json.load(sys.stdin):
    try:
        answers.append(str(client.command(statement)))
    except Exception as error:
        answers.append("refused: " + str(error).splitlines()[0])
json.dump(answers, sys.stdout)
"""

FOREIGN = [
    "SELECT * FROM url('http://127.0.0.1:1/', CSV, 'a String')",
    "SELECT * FROM file('/etc/passwd', CSV, 'a String')",
    "SELECT * FROM s3('http://127.0.0.1:1/bucket/key', CSV, 'a String')",
    "SELECT * FROM mysql('127.0.0.1:1', 'a', 'b', 'c', 'd')",
    "CREATE USER mallory",
    "GRANT ALL ON *.* TO default",
    "SYSTEM SHUTDOWN",
    "SYSTEM DROP MARK CACHE",
    "CREATE DATABASE other",
]
"""Statements that are forbidden for both accounts."""

WRITES = [
    "INSERT INTO rankscope.spans (run_id) SELECT 'x'",
    "ALTER TABLE rankscope.spans DELETE WHERE 1",
    "DELETE FROM rankscope.spans WHERE 1",
    "TRUNCATE TABLE rankscope.spans",
    "DROP TABLE rankscope.spans",
    "CREATE TABLE rankscope.t (a Int8) ENGINE = Memory",
    "SET max_memory_usage = 1000000000000",
    "SET final = 0",
    "SET readonly = 0",
    "SELECT 1 SETTINGS max_result_rows = 0",
    "SELECT * FROM executable('id', CSV, 'a String')",
    "SELECT * FROM remote('127.0.0.1:1', rankscope, spans)",
    "SELECT * FROM cluster('rankscope', rankscope, spans)",
    "SELECT * FROM clusterAllReplicas('rankscope', system, one)",
]
"""Further statements that are forbidden for the reader."""


def as_default(account: str, folder: Path) -> Path:
    """Write a configuration whose only user has the profile and grants of the account."""
    root = xml(USERS_XML)
    user = root.find(f"users/{account}")
    profile = root.find(f"profiles/{account}")
    assert user is not None
    assert profile is not None
    for constraints in profile.findall("constraints"):
        profile.remove(constraints)
    grants = texts(user, "grants/query")

    users = Xml.Element("clickhouse")
    Xml.SubElement(users, "profiles").append(renamed(profile, "default"))
    default = Xml.SubElement(Xml.SubElement(users, "users"), "default")
    Xml.SubElement(default, "password")
    Xml.SubElement(default, "profile").text = "default"
    Xml.SubElement(default, "quota").text = "default"
    Xml.SubElement(Xml.SubElement(default, "networks"), "ip").text = "::/0"
    listed = Xml.SubElement(default, "grants")
    for grant in grants:
        Xml.SubElement(listed, "query").text = grant
    Xml.SubElement(Xml.SubElement(users, "quotas"), "default")
    Xml.ElementTree(users).write(folder / "users.xml")

    configuration = folder / f"{account}.xml"
    users_file = f"<users_config>{folder / 'users.xml'}</users_config></clickhouse>"
    configuration.write_text(CONFIGURATION.replace("</clickhouse>", users_file))
    return configuration


def renamed(element: Xml.Element, tag: str) -> Xml.Element:
    twin = copy.deepcopy(element)
    twin.tag = tag
    return twin


def asked(account: str, folder: Path, statements: list[str]) -> list[str]:
    """Return the engine's answers to an account, one line per statement."""
    configuration = as_default(account, folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "store"), str(configuration)],
        input=json.dumps(statements), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    answers: list[str] = json.loads(done.stdout)
    return answers


DATABASE = "CREATE DATABASE IF NOT EXISTS rankscope"
SPANS = (
    "CREATE TABLE rankscope.spans (run_id String, row Int8)"
    " ENGINE = ReplacingMergeTree ORDER BY row"
)
OVER_ALL = (
    "CREATE TABLE rankscope.spans AS rankscope.spans_local"
    " ENGINE = Distributed('rankscope', rankscope, spans_local, row)"
)
TWICE = "INSERT INTO rankscope.spans SELECT 'r', 1"


@pytest.mark.multiproc
def test_a_reader_reads_each_row_once_and_can_do_nothing_else(tmp_path: Path) -> None:
    # GIVEN a table with a row that is stored twice
    made = asked(WRITER, tmp_path, [DATABASE, SPANS, TWICE, TWICE])
    assert [answer for answer in made if answer.startswith("refused")] == []

    # WHEN the reader selects it, and then tries every forbidden statement
    count = "SELECT count() FROM rankscope.spans"
    counted, *refused = asked(
        READER, tmp_path, [count, *WRITES, *FOREIGN, "SHOW CREATE USER default"]
    )

    # THEN it gets one row, and the engine refuses all others
    assert counted == "1"
    assert [answer for answer in refused if not answer.startswith("refused")] == []
    assert [
        answer for answer in refused if "ACCESS_DENIED" not in answer and "READONLY" not in answer
    ] == []


@pytest.mark.multiproc
def test_the_collectors_account_can_do_all_that_a_store_does_and_nothing_beyond(
    tmp_path: Path,
) -> None:
    needed = [
        DATABASE,
        SPANS.replace("spans", "spans_local"),
        OVER_ALL,
        TWICE,
        "ALTER TABLE rankscope.spans_local ADD COLUMN IF NOT EXISTS a Int8",
        "ALTER TABLE rankscope.spans_local MODIFY COLUMN a CODEC(ZSTD(1))",
        "ALTER TABLE rankscope.spans ADD COLUMN IF NOT EXISTS a Int8",
        "SELECT count() FROM rankscope.spans FINAL",
        "DELETE FROM rankscope.spans_local WHERE row = 1",
        "ALTER TABLE rankscope.spans_local APPLY DELETED MASK SETTINGS mutations_sync = 0",
        "SELECT count() FROM system.mutations",
        "OPTIMIZE TABLE rankscope.spans_local FINAL",
        "TRUNCATE TABLE rankscope.spans_local",
        "DROP TABLE IF EXISTS rankscope.spans",
    ]

    answers = asked(WRITER, tmp_path, [*needed, *FOREIGN])

    assert [answer for answer in answers[: len(needed)] if answer.startswith("refused")] == []
    assert [answer for answer in answers[len(needed) :] if "ACCESS_DENIED" not in answer] == []


def limits_of(account: str) -> dict[str, str]:
    (profile,) = xml(USERS_XML).iterfind(f"profiles/{account}")
    return {one.tag: (one.text or "").strip() for one in profile if one.tag != "constraints"}


def test_a_readers_limits_are_set_and_only_its_time_may_be_chosen_up_to_a_minute() -> None:
    limits = limits_of(READER)

    assert limits["readonly"] == "1"
    for name in ("max_execution_time", "max_memory_usage", "max_result_rows", "max_rows_to_read"):
        assert int(limits[name]) > 0
    profile: Any = xml(USERS_XML).find(f"profiles/{READER}/constraints")
    loose = {one.tag for one in profile if one.find("changeable_in_readonly") is not None}
    assert loose == {"max_execution_time", "enable_http_compression"}
    assert texts(profile, "max_execution_time/max") == ["60"]
    # Without this the server would not load the file above.
    assert texts(
        xml(SERVER_XML), "access_control_improvements/settings_constraints_replace_previous"
    ) == ["true"]


def test_the_account_without_a_password_is_gone_and_no_other_is_open() -> None:
    users = xml(USERS_XML).find("users")
    assert users is not None

    assert [one.tag for one in users] == ["default", WRITER, READER]
    assert users[0].attrib == {"remove": "remove"}
    for account in users[1:]:
        password = account.find("password")
        assert password is not None
        assert set(password.attrib) == {"from_env"}
        assert not any(ip in {"::/0", "0.0.0.0/0"} for ip in texts(account, "networks/ip"))
        assert account.find("access_management") is None
        assert texts(account, "profile") == [account.tag]


@pytest.mark.multiproc
def test_the_engine_knows_every_setting_of_both_profiles(tmp_path: Path) -> None:
    wanted = sorted({*limits_of(READER), *limits_of(WRITER)})
    listed = ", ".join(f"'{name}'" for name in wanted)

    (found,) = asked(
        WRITER, tmp_path, [f"SELECT count() FROM system.settings WHERE name IN ({listed})"]
    )

    assert int(found) == len(wanted)
