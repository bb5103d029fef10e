"""Refused statements: the list of fault E6, with variations of nesting and spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.gateway.errors import QueryError
from tests.collector.gateway.conftest import CANARY

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.collector.gateway.conftest import Ask

TABLE_SOURCES = [
    "file('{secret}', 'LineAsString')",
    "file('{secret}')",
    "url('http://127.0.0.1:9/', 'CSV', 'a String')",
    "urlCluster('default', 'http://127.0.0.1:9/', 'CSV', 'a String')",
    "remote('127.0.0.1:9', 'system', 'one')",
    "remoteSecure('127.0.0.1:9', system.one)",
    "s3('http://127.0.0.1:9/bucket/x', 'CSV', 'a String')",
    "s3Cluster('default', 'http://127.0.0.1:9/bucket/x', 'CSV', 'a String')",
    "gcs('http://127.0.0.1:9/bucket/x', 'CSV', 'a String')",
    "azureBlobStorage('DefaultEndpointsProtocol=http', 'c', 'x', 'CSV', 'auto', 'a String')",
    "hdfs('hdfs://127.0.0.1:9/x', 'CSV', 'a String')",
    "executable('id', 'TSV', 'a String')",
    "mysql('127.0.0.1:9', 'd', 't', 'u', 'p')",
    "postgresql('127.0.0.1:9', 'd', 't', 'u', 'p')",
    "mongodb('127.0.0.1:9', 'd', 'c', 'u', 'p', 'a String')",
    "redis('127.0.0.1:9', 'k', 'k String')",
    "sqlite('{secret}', 't')",
    "odbc('DSN=x', 'd', 't')",
    "jdbc('x', 'd', 't')",
    "iceberg('http://127.0.0.1:9/x')",
    "icebergLocal('{secret}')",
    "deltaLakeLocal('{secret}')",
    "hudi('http://127.0.0.1:9/x')",
    "dictionary('d')",
    "cluster('default', system.one)",
    "clusterAllReplicas('default', system.one)",
    "merge('system', '.*')",
    "merge('default', '.*')",
    "mergeTreeIndex('default', 'clock')",
    "python(x)",
    "filesystem('/')",
    "loop(system.one)",
    "eval('SELECT 1')",
    "input('a String')",
    "fuzzQuery('SELECT 1')",
    "generateRandom('a UInt8')",
    "viewExplain('EXPLAIN', '', (SELECT 1))",
    "system.users",
    "system.processes",
    "system.query_log",
    "system.server_settings",
    "system.named_collections",
    "system.clusters",
    "system.disks",
    "system.dictionaries",
    "system.environment",
    "system.merge_tree_settings",
    "system.grants",
    "system.errors",
    "system.parts",
    "system.text_log",
    "`system`.`users`",
    "information_schema.tables",
    "INFORMATION_SCHEMA.TABLES",
]

SCALARS = [
    "file('{secret}')",
    "FILE('{secret}')",
    "sleep(0.01)",
    "sleepEachRow(0.01)",
    "dictGet('d', 'a', 1)",
    "dictHas('d', 1)",
    "joinGet('clock', 'host', 'x')",
    "getSetting('max_threads')",
    "getServerSetting('max_server_memory_usage')",
    "getMacro('x')",
    "getClientHTTPHeader('x')",
    "serverUUID()",
    "hostName()",
    "hostname()",
    "FQDN()",
    "fullHostName()",
    "tcpPort()",
    "uptime()",
    "filesystemAvailable()",
    "showCertificate()",
    "addressToLine(1)",
    "demangle('x')",
    "logTrace('x')",
    "aiGenerate('x')",
    "AIGenerate('x')",
    "formatRow('Template', 1)",
    "formatQuery('SELECT 1')",
    "hasColumnInTable('system', 'users', 'name')",
    "catboostEvaluate('{secret}', 1)",
    "naiveBayesClassifier('x', 'y')",
    "evalMLMethod(1, 2)",
    "throwIf(0)",
    "aFunctionOfTheFuture(1)",
]

OTHER_STATEMENTS = [
    "INSERT INTO clock (host) VALUES ('x')",
    "INSERT INTO clock SELECT * FROM clock",
    "INSERT INTO FUNCTION file('{written}') SELECT 1",
    "INSERT INTO clock FROM INFILE '{secret}' FORMAT CSV",
    "SELECT 1 INTO OUTFILE '{written}'",
    "SELECT 1 INTO OUTFILE '{written}' FORMAT CSV",
    "(SELECT 1) INTO OUTFILE '{written}' APPEND",
    "SELECT 1 UNION ALL SELECT 2 INTO OUTFILE '{written}' TRUNCATE",
    "SET max_threads = 1",
    "SET readonly = 0",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT * FROM (SELECT 1 SETTINGS max_execution_time = 0)",
    "SELECT 1 FORMAT Template",
    "SELECT 1 FORMAT Protobuf",
    "SELECT 1 FORMAT CapnProto",
    "CREATE TABLE x (a UInt8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE x (a UInt8)",
    "CREATE TABLE x ENGINE = File(CSV) AS SELECT 1",
    "CREATE VIEW x AS SELECT 1",
    "CREATE FUNCTION f AS x -> x",
    "CREATE USER x",
    "CREATE DICTIONARY d (a UInt8) PRIMARY KEY a SOURCE(FILE(path '{secret}')) LAYOUT(FLAT())",
    "CREATE NAMED COLLECTION c AS a = 1",
    "ALTER TABLE clock DELETE WHERE 1",
    "ALTER TABLE clock ADD COLUMN x UInt8",
    "DELETE FROM clock WHERE 1",
    "UPDATE clock SET host = 'x' WHERE 1",
    "TRUNCATE TABLE clock",
    "DROP TABLE clock",
    "DROP DATABASE default",
    "RENAME TABLE clock TO x",
    "EXCHANGE TABLES clock AND runs",
    "DETACH TABLE clock",
    "ATTACH TABLE x",
    "OPTIMIZE TABLE clock FINAL",
    "CHECK TABLE clock",
    "BACKUP TABLE clock TO File('{written}')",
    "RESTORE TABLE clock FROM File('{secret}')",
    "KILL QUERY WHERE 1",
    "KILL MUTATION WHERE 1",
    "SYSTEM SHUTDOWN",
    "SYSTEM FLUSH LOGS",
    "SYSTEM RELOAD CONFIG",
    "SYSTEM STOP MERGES",
    "USE system",
    "GRANT ALL ON *.* TO default",
    "REVOKE ALL ON *.* FROM default",
    "EXECUTE AS default SELECT 1",
    "EXPLAIN SELECT 1",
    "EXPLAIN AST SELECT 1",
    "DESCRIBE TABLE system.users",
    "DESCRIBE TABLE file('{secret}')",
    "DESCRIBE (SELECT file('{secret}'))",
    "SHOW CREATE TABLE clock",
    "SHOW PROCESSLIST",
    "SHOW GRANTS",
    "SHOW USERS",
    "SHOW SETTINGS LIKE 'max%'",
    "SHOW TABLES WHERE file('{secret}') != ''",
    "SHOW TABLES LIMIT (SELECT 1)",
    "SHOW DATABASES WHERE 1",
    "SHOW FULL TABLES FROM system LIKE 'x' LIMIT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE clock",
    "SELECT 1 FORMAT TSV; DROP TABLE clock",
    "SELECT 1 PARALLEL WITH SELECT 2",
    "BEGIN TRANSACTION",
    "EXISTS TABLE clock",
    "SELECT * APPLY(file) FROM (SELECT '{secret}')",
    "SELECT * APPLY(x -> file(x)) FROM (SELECT '{secret}')",
    "SELECT COLUMNS('.*') REPLACE(file('{secret}') AS host) FROM clock",
    "SELECT 1 ORDER BY 1 WITH FILL FROM 1 TO 2 INTERPOLATE (x AS file('{secret}'))",
    "SELECT sum(1) OVER (PARTITION BY file('{secret}'))",
    "SELECT quantile(file('{secret}'))(1)",
    "SELECT 1 LIMIT (SELECT length(file('{secret}')))",
    "SELECT 1 IN system.users",
    "SELECT 1 NOT IN (system.processes)",
    "WITH system.users AS t SELECT 1 IN t",
    "SELECT `file`('{secret}')",
    "SELECT \"file\"('{secret}')",
    "FROM system.users SELECT *",
    "TABLE system.users",
    "",
    ";",
    "-- nothing",
]

CONTEXTS = [
    "SELECT * FROM {source}",
    "SELECT 1 WHERE EXISTS (SELECT * FROM {source})",
    "SELECT 1 WHERE 1 IN (SELECT * FROM {source})",
    "SELECT 1 WHERE 1 GLOBAL NOT IN (SELECT 1 FROM {source})",
    "SELECT (SELECT count() FROM {source})",
    "WITH t AS (SELECT * FROM {source}) SELECT * FROM t",
    "WITH (SELECT count() FROM {source}) AS n SELECT n",
    "SELECT * FROM clock AS a JOIN {source} AS b ON 1 = 1",
    "SELECT * FROM clock AS a, {source} AS b",
    "SELECT * FROM clock UNION ALL SELECT * FROM {source}",
    "SELECT * FROM clock INTERSECT SELECT * FROM {source}",
    "SELECT * FROM view(SELECT * FROM {source})",
    "SELECT * FROM (SELECT * FROM (SELECT * FROM {source}))",
    "SELECT count() FROM clock HAVING count() > (SELECT count() FROM {source})",
    "SELECT host FROM clock ORDER BY (SELECT count() FROM {source})",
    "SELECT host FROM clock QUALIFY (SELECT count() FROM {source}) > 0",
    "SELECT host FROM clock PREWHERE (SELECT count() FROM {source}) > 0",
    "SELECT arrayMap(x -> (SELECT count() FROM {source}), [1])",
    "SELECT if(0, (SELECT count() FROM {source}), 1)",
]

SCALAR_CONTEXTS = [
    "SELECT {scalar}",
    "SELECT 1 WHERE {scalar} = ''",
    "SELECT arrayMap(x -> {scalar}, [1])",
    "SELECT (SELECT {scalar})",
    "WITH {scalar} AS x SELECT x",
    "SELECT if(0, {scalar}, 'x')",
    "SELECT host FROM clock GROUP BY host HAVING max({scalar}) = ''",
    "SELECT host FROM clock ORDER BY {scalar}",
    "SELECT 1 FROM clock ARRAY JOIN [{scalar}] AS x",
    "SELECT max({scalar}) OVER (ORDER BY host) FROM clock",
    "SELECT [{scalar}][1], ({scalar}, 1).1, map('a', {scalar})",
    "SELECT CASE WHEN 1 THEN {scalar} ELSE '' END",
    "SELECT * FROM numbers(length({scalar}))",
    "SELECT * FROM values('a String', {scalar})",
]


@pytest.fixture(scope="module")
def filled(store: Store) -> dict[str, str]:
    """Return the values of the statements' placeholders."""
    assert store.path is not None
    return {
        "secret": str(store.path / "secret.txt"),
        "written": str(store.path.parent / "written.csv"),
    }


def refuse(ask: Ask, text: str) -> QueryError:
    with pytest.raises(QueryError) as caught:
        ask(text)
    assert CANARY not in caught.value.body()
    return caught.value


@pytest.mark.parametrize("source", TABLE_SOURCES)
def test_a_source_that_is_not_the_stores_own_is_refused(
    ask: Ask, filled: dict[str, str], source: str
) -> None:
    error = refuse(ask, f"SELECT * FROM {source}".format(**filled))

    assert error.code in {497, 164, 62}, error.body()


@pytest.mark.parametrize("scalar", SCALARS)
def test_a_function_with_access_to_the_host_is_refused(
    ask: Ask, filled: dict[str, str], scalar: str
) -> None:
    assert refuse(ask, f"SELECT {scalar}".format(**filled)).code == 497


@pytest.mark.parametrize("statement", OTHER_STATEMENTS)
def test_a_statement_that_does_more_than_read_is_refused(
    ask: Ask, filled: dict[str, str], statement: str
) -> None:
    error = refuse(ask, statement.format(**filled))

    assert error.code in {164, 497, 62, 73}, error.body()


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_same_statement_about_an_allowed_source_is_answered(ask: Ask, context: str) -> None:
    ask(
        context.replace(
            "{source}",
            "(SELECT at_ns, host, boot_id, 1, 2, 3 FROM clock)"
            if "UNION" in context or "INTERSECT" in context
            else "numbers(1)",
        )
    )


@pytest.mark.parametrize("context", SCALAR_CONTEXTS)
def test_the_same_statement_with_an_allowed_function_is_answered(ask: Ask, context: str) -> None:
    ask(context.replace("{scalar}", "concat('x', 'y')"))


def spelled(draw: st.DrawFn, text: str) -> str:
    """Return a statement in another spelling: case, comments and blanks."""
    blank = st.sampled_from([" ", "\n", "\t", " /* x */ ", " -- x\n", "  ", " #! x\n", "\u00a0"])
    words = text.split(" ")
    joined = words[0]
    for word in words[1:]:
        joined += draw(blank) + word
    for keyword in ("SELECT", "FROM", "WHERE", "WITH", "EXISTS", "JOIN", "UNION", "IN "):
        if draw(st.booleans()):
            joined = joined.replace(keyword, keyword.lower())
    return draw(st.sampled_from(["", "/**/", "(", "\n"])) + joined


@st.composite
def forbidden(draw: st.DrawFn) -> str:
    if draw(st.booleans()):
        inner = draw(st.sampled_from(CONTEXTS)).replace(
            "{source}", draw(st.sampled_from(TABLE_SOURCES))
        )
    else:
        inner = draw(st.sampled_from(SCALAR_CONTEXTS)).replace(
            "{scalar}", draw(st.sampled_from(SCALARS))
        )
    outer = draw(st.sampled_from([*CONTEXTS, "{source}"]))
    whole = inner if outer == "{source}" else outer.replace("{source}", f"({inner})")
    text = spelled(draw, whole)
    return text + ")" if text.startswith("(") else text


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(statement=forbidden())
def test_no_nesting_or_spelling_allows_a_forbidden_source(
    ask: Ask, filled: dict[str, str], statement: str
) -> None:
    for name, path in filled.items():
        statement = statement.replace(f"{{{name}}}", path)

    error = refuse(ask, statement)

    # 62: in this spelling it is not a statement any more.
    assert error.code in {497, 164, 62}, error.body()


def test_bound_names_are_checked_like_written_ones(ask: Ask) -> None:
    assert ask("SELECT count() FROM {t:Identifier}", t="clock") == b"1\n"
    for name in ("system.users", "users` FROM system.`users", "a\\nb", "x, identifier: clock"):
        with pytest.raises(QueryError):
            ask("SELECT * FROM {t:Identifier}", t=name)
    with pytest.raises(QueryError, match=r"system\.users"):
        ask("SELECT 1 IN {t:Identifier}", t="system.users")


def test_a_name_with_a_line_break_is_refused(ask: Ask) -> None:
    with pytest.raises(QueryError, match="control character"):
        ask("SELECT 1 AS `x\\n FUNCTION id: 1, function_name: plus`")


def test_no_text_is_read_as_the_bytes_of_an_aggregates_state(ask: Ask) -> None:
    # The bytes of a sum's state of 5. Read as bytes it would be 5; as text it is not a number.
    made = "CAST(unhex('0500000000000000'), concat('Aggregate', 'Function(sum, UInt64)'))"
    assert ask(f"SELECT finalizeAggregation({made})") == b"0\n"
    assert ask("SELECT sumMerge(CAST('5', 'AggregateFunction(sum, UInt64)'))") == b"5\n"
    for bound in ("AggregateFunction(sum, UInt64)", "Array(AggregateFunction(sum, UInt64))"):
        with pytest.raises(QueryError, match="aggregate state is refused"):
            ask(f"SELECT {{a:{bound}}}", a="\\x05")


def test_nothing_was_written_or_changed(
    ask: Ask, filled: dict[str, str], store: Store, tmp_path: Path
) -> None:
    for statement in OTHER_STATEMENTS:
        with pytest.raises(QueryError):
            ask(statement.format(**filled))

    assert store.rows("SELECT host FROM clock") == [{"host": "node-1"}]
    assert store.path is not None
    assert not (store.path.parent / "written.csv").exists()
    assert list(tmp_path.iterdir()) == []
    names = {row["name"] for row in store.rows("SHOW TABLES")}
    assert "x" not in names
    assert {"clock", "runs", "spans"} <= names
