"""Rewriting of statements for tables on a cluster: local tables, and one table over all of them.

A table of a migration becomes two on every server: ``spans_local``, replicated within its shard,
and ``spans``, a Distributed table that everything reads and writes. So queries stay the same; only
statements that change tables are rewritten.

A row's shard is a function of its sort key. So rows of one identity are always in one shard, where
``FINAL`` and merges see them together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CollectorError
from .location import EmbeddedLocation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .location import ServerLocation

LOCAL_SUFFIX = "_local"
REPLICA_PATH = "/clickhouse/tables/{shard}/{database}/{table}"
"""Path in the keeper; the servers' macros fill it in."""

SHARDING_COLUMNS = ("run_id", "rank", "host")
"""Columns of a sort key that choose a row's shard; a table without them is on the first shard."""

CLUSTER_SETTINGS: dict[str, str | int] = {
    # An insert returns when all shards concerned have its rows on disk.
    "distributed_foreground_insert": 1,
    # Replicas lag, and an insert that reached one of two shards is sent again. The ledger may be
    # older than the rows, so every read removes duplicates.
    "final": 1,
    "distributed_product_mode": "global",
    # A shard that does not answer is an error, not a smaller result.
    "skip_unavailable_shards": 0,
    # All servers prefer the same replica of a shard, so one collector reads what another wrote.
    "load_balancing": "in_order",
    "prefer_localhost_replica": 0,
    # The engine keeps block hashes for days: deleted rows could not be written again.
    "insert_deduplicate": 0,
    # A server that is down creates new tables from the keeper when it is back.
    "distributed_ddl_output_mode": "throw_only_active",
    "lightweight_deletes_sync": 1,
}
"""Settings of a connection with which a cluster answers as one server does."""

BOTH_TABLES = frozenset(
    {
        "ADD COLUMN",
        "DROP COLUMN",
        "MODIFY COLUMN",
        "RENAME COLUMN",
        "COMMENT COLUMN",
        "MODIFY COMMENT",
    }
)
UNCHANGED = frozenset({"SELECT", "INSERT", "SET", "SYSTEM", "KILL", "EXPLAIN", "SHOW", "WITH"})
NO_WAITING = " SETTINGS lightweight_deletes_sync = 0"

NAME = r"(?P<table>\w+)"
NAME_OR_BOUND = r"(?P<table>\w+|\{(?P<bound>\w+):Identifier\})"


def _form(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("@name", NAME).replace("@table", NAME_OR_BOUND), re.DOTALL)


CREATE = _form(
    r"CREATE TABLE IF NOT EXISTS @name (?P<columns>\(.*\)|AS \w+)\s+"
    r"ENGINE = (?P<engine>\w*MergeTree)(?:\((?P<arguments>[^()]*)\))?\s+"
    r"(?P<rest>(?:PARTITION BY .*)?ORDER BY (?P<order>\([^()]*\)|\w+).*)"
)
VIEW = _form(
    r"CREATE MATERIALIZED VIEW IF NOT EXISTS @name TO (?P<target>\w+)\s+"
    r"AS (?P<columns>SELECT .*)\s+FROM (?P<source>\w+)\s+(?P<rest>WHERE .*)"
)
EXCHANGE = _form(r"EXCHANGE TABLES @name AND (?P<other>\w+)")
FROM_TABLE = _form(r"(?P<begin>REPLACE PARTITION \S+ FROM )@name")
ALTER = _form(r"ALTER TABLE @table\s+(?P<rest>.+)")
DELETE = _form(r"DELETE FROM @table\s+(?P<rest>.+)")
WHOLE = _form(r"(?P<verb>OPTIMIZE TABLE|TRUNCATE TABLE) @table(?P<rest>.*)")
DROP = _form(r"DROP TABLE IF EXISTS @name(?P<rest>.*)")


class ClusterStatementError(CollectorError):
    """A statement changes tables in a form that has no rewriting for a cluster."""

    def __init__(self, statement: str, reason: str) -> None:
        first = statement.strip().splitlines()[0][:80] if statement.strip() else ""
        super().__init__(f"on a cluster, {first!r}: {reason}; see collector/store/cluster.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement with its bound values."""

    sql: str
    parameters: Mapping[str, Any] | None


def make_statements(
    location: EmbeddedLocation | ServerLocation,
) -> OneServerStatements | ClusterStatements:
    """Return the rewriting for a store at ``location``."""
    if isinstance(location, EmbeddedLocation) or location.cluster is None:
        return OneServerStatements()
    return ClusterStatements(cluster=location.cluster, database=location.database)


def cluster_settings(location: ServerLocation) -> dict[str, str | int]:
    """Return the settings of a connection to a cluster; none for a single server."""
    if location.cluster is None:
        return {}
    quorum = {"insert_quorum": location.quorum} if location.quorum > 1 else {}
    return CLUSTER_SETTINGS | quorum


class OneServerStatements:
    """Statements for a single server: unchanged."""

    def rewrite(
        self, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[Statement, ...]:
        """Return ``sql`` unchanged."""
        return (Statement(sql=sql, parameters=parameters),)

    def local_table(self, table: str) -> str:
        """Return ``table``."""
        return table


class ClusterStatements:
    """Statements for a cluster: run on each of its servers.

    Args:
        cluster: Name of the cluster in the servers' configuration; an identifier.
        database: Database of the tables; an identifier.
    """

    def __init__(self, *, cluster: str, database: str) -> None:
        self._on_cluster = f"ON CLUSTER `{cluster}`"
        self._cluster = cluster
        self._database = database

    def rewrite(
        self, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[Statement, ...]:
        """Return the statements to run instead of ``sql``, in order; a query stays unchanged.

        Raises:
            ClusterStatementError: The statement has no known form.
        """
        text = sql.strip()
        if text.split(None, 1)[0].upper() in UNCHANGED:
            return (Statement(sql=sql, parameters=parameters),)
        for form, rewritten in (
            (CREATE, self._create),
            (VIEW, self._view),
            (EXCHANGE, self._exchange),
            (ALTER, self._alter),
            (DELETE, self._delete),
            (WHOLE, self._whole),
            (DROP, self._drop),
        ):
            match = form.fullmatch(text)
            if match:
                return tuple(
                    Statement(sql=statement, parameters=_with_local_name(parameters, match))
                    for statement in rewritten(match)
                )
        raise ClusterStatementError(sql, "unknown form of a statement that changes tables")

    def local_table(self, table: str) -> str:
        """Return the name of the local table; ``table`` itself stores no rows."""
        return table + LOCAL_SUFFIX

    def _create(self, match: re.Match[str]) -> tuple[str, ...]:
        table, given = match["table"], match["arguments"]
        arguments = f"'{REPLICA_PATH}', '{{replica}}'" + (f", {given}" if given else "")
        whole = _quoted(self._database, table)
        local = " ".join(
            (
                "CREATE TABLE IF NOT EXISTS", self._local(table), self._on_cluster,
                match["columns"], f"ENGINE = Replicated{match['engine']}({arguments})",
                match["rest"],
            )
        )  # fmt: skip
        over = " ".join(
            (
                "CREATE TABLE IF NOT EXISTS", whole, self._on_cluster, "AS", self._local(table),
                f"ENGINE = Distributed('{self._cluster}', '{self._database}',",
                f"'{table}{LOCAL_SUFFIX}', {sharding_key(match['order'])})",
            )
        )  # fmt: skip
        return (local, over)

    def _view(self, match: re.Match[str]) -> tuple[str, ...]:
        """Each server adds up the rows that are inserted into its own tables."""
        return (
            " ".join(
                (
                    "CREATE MATERIALIZED VIEW IF NOT EXISTS", self._local(match["table"]),
                    self._on_cluster, "TO", self._local(match["target"]), "AS", match["columns"],
                    "FROM", self._local(match["source"]), "AS", match["source"], match["rest"],
                )
            ),
        )  # fmt: skip

    def _exchange(self, match: re.Match[str]) -> tuple[str, ...]:
        """The tables over all shards find the exchanged ones by their names."""
        tables = f"{self._local(match['table'])} AND {self._local(match['other'])}"
        return (f"EXCHANGE TABLES {tables} {self._on_cluster}",)

    def _alter(self, match: re.Match[str]) -> tuple[str, ...]:
        kinds = {" ".join(part.split()[:2]).upper() for part in _top_level(match["rest"])}
        if kinds & BOTH_TABLES and kinds - BOTH_TABLES:
            raise ClusterStatementError(match[0], "columns and other changes in one ALTER")
        if kinds & BOTH_TABLES and match["bound"]:
            raise ClusterStatementError(match[0], "columns of a table whose name is bound")
        rest = FROM_TABLE.sub(
            lambda source: f"{source['begin']}{self._local(source['table'])}", match["rest"]
        )
        names = [self._local(match["table"])]
        if kinds & BOTH_TABLES:  # last, so that no query uses a column before the local one has it
            names.append(_quoted(self._database, match["table"]))
        return tuple(" ".join(("ALTER TABLE", name, self._on_cluster, rest)) for name in names)

    def _delete(self, match: re.Match[str]) -> tuple[str, ...]:
        # One server reports its progress later; on a cluster the statement itself must wait.
        local, rest = self._local(match["table"]), match["rest"].removesuffix(NO_WAITING)
        return (" ".join(("DELETE FROM", local, self._on_cluster, rest)),)

    def _whole(self, match: re.Match[str]) -> tuple[str, ...]:
        local = self._local(match["table"])
        return (" ".join((match["verb"], local, self._on_cluster)) + match["rest"],)

    def _drop(self, match: re.Match[str]) -> tuple[str, ...]:
        names = (_quoted(self._database, match["table"]), self._local(match["table"]))
        return tuple(
            " ".join(("DROP TABLE IF EXISTS", name, self._on_cluster)) + match["rest"]
            for name in names
        )

    def _local(self, table: str) -> str:
        # A bound name gets its suffix from `_with_local_name`.
        return _quoted(self._database, table if "{" in table else table + LOCAL_SUFFIX)


def sharding_key(order: str) -> str:
    """Return the expression that chooses a row's shard, derived from its table's ``ORDER BY``."""
    ordered = re.findall(r"\w+", order)
    columns = [name for name in SHARDING_COLUMNS if name in ordered]
    return f"cityHash64({', '.join(columns)})" if columns else "0"


def _with_local_name(
    parameters: Mapping[str, Any] | None, match: re.Match[str]
) -> Mapping[str, Any] | None:
    bound = match.groupdict().get("bound")
    if bound is None or parameters is None:
        return parameters
    name = str(parameters[bound])
    return {**parameters, bound: name.removesuffix(LOCAL_SUFFIX) + LOCAL_SUFFIX}


def _quoted(database: str, table: str) -> str:
    return f"`{database}`.{table}" if "{" in table else f"`{database}`.`{table}`"


def _top_level(commands: str) -> list[str]:
    """Split at the commas outside parentheses and texts."""
    parts, depth, in_text = [""], 0, False
    for letter in commands:
        in_text ^= letter == "'"
        depth += 0 if in_text else {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth and not in_text:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
