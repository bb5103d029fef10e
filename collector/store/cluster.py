"""Statements for tables that lie on a cluster: local tables, and one table over all of them.

A table of a migration becomes two on every server: ``spans_local``, replicated within
its shard, and ``spans``, a Distributed table by which everything reads and writes. So
no query knows of the cluster; only what changes tables is said in another way.

A row's shard is a function of its sort key. Rows of one identity therefore always
meet in one shard, where ``FINAL`` and merges see both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CollectorError
from .location import EmbeddedLocation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .location import ServerLocation

LOCAL_SUFFIX = "_local"
REPLICA_PATH = "/clickhouse/tables/{shard}/{database}/{table}"
"""In the keeper; the servers' macros fill it in."""

SHARDING_COLUMNS = ("run_id", "rank", "host")
"""Those of a table's sort key decide its shard; a table without any lies on the first one."""

CLUSTER_SETTINGS: dict[str, str | int] = {
    # An insert returns when every shard that it concerns has its rows on disk.
    "distributed_foreground_insert": 1,
    # Replicas lag, and an insert that reached one shard of two is sent again: the ledger of one
    # moment can't promise for the rows of another, so every read removes duplicates.
    "final": 1,
    "distributed_product_mode": "global",
    # A shard that does not answer is an error, never a smaller result.
    "skip_unavailable_shards": 0,
    # All servers prefer the same replica of a shard: what one collector wrote, the next one reads.
    "load_balancing": "in_order",
    "prefer_localhost_replica": 0,
    # Block hashes are remembered for days: rows that were deleted could not be written again.
    "insert_deduplicate": 0,
    # A server that is down learns of new tables from the keeper when it is back.
    "distributed_ddl_output_mode": "throw_only_active",
    "lightweight_deletes_sync": 1,
}
"""What makes a cluster answer as one server does; sent with each connection."""

BOTH_TABLES = frozenset(
    {"ADD COLUMN", "DROP COLUMN", "MODIFY COLUMN", "RENAME COLUMN", "COMMENT COLUMN"}
)
UNCHANGED = frozenset({"SELECT", "INSERT", "SET", "SYSTEM", "KILL", "EXPLAIN", "SHOW", "WITH"})
NO_WAITING = " SETTINGS lightweight_deletes_sync = 0"

NAME = r"(?P<table>\w+)"
NAME_OR_BOUND = r"(?P<table>\w+|\{(?P<bound>\w+):Identifier\})"


def _form(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("@name", NAME).replace("@table", NAME_OR_BOUND), re.DOTALL)


CREATE = _form(
    r"CREATE TABLE IF NOT EXISTS @name (?P<columns>\(.*\))\s+"
    r"ENGINE = (?P<engine>\w*MergeTree)(?:\((?P<arguments>[^()]*)\))?\s+"
    r"(?P<rest>(?:PARTITION BY .*)?ORDER BY (?P<order>\([^()]*\)|\w+).*)"
)
ALTER = _form(r"ALTER TABLE @table\s+(?P<rest>.+)")
DELETE = _form(r"DELETE FROM @table\s+(?P<rest>.+)")
WHOLE = _form(r"(?P<verb>OPTIMIZE TABLE|TRUNCATE TABLE) @table(?P<rest>.*)")
DROP = _form(r"DROP TABLE IF EXISTS @name(?P<rest>.*)")


class ClusterStatementError(CollectorError):
    """A statement changes tables in a way that has no meaning here on a cluster."""

    def __init__(self, statement: str, reason: str) -> None:
        first = statement.strip().splitlines()[0][:80] if statement.strip() else ""
        super().__init__(f"on a cluster, {first!r}: {reason}; see collector/store/cluster.py")
        self.statement = statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What is sent, with its bound values."""

    sql: str
    parameters: Mapping[str, Any] | None


class Statements(Protocol):
    """How a store says a statement that returns nothing."""

    def of(self, sql: str, parameters: Mapping[str, Any] | None = None) -> tuple[Statement, ...]:
        """Return what to run for ``sql``, in this order."""

    def table_here(self, table: str) -> str:
        """Return the name of the table that holds the rows on the server that is asked."""


def statements_for(location: EmbeddedLocation | ServerLocation) -> Statements:
    """Return how a store at ``location`` says its statements."""
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
    """Says every statement as it is: the tables lie in one place."""

    def of(self, sql: str, parameters: Mapping[str, Any] | None = None) -> tuple[Statement, ...]:
        """Return ``sql`` alone."""
        return (Statement(sql=sql, parameters=parameters),)

    def table_here(self, table: str) -> str:
        """Return ``table``."""
        return table


class ClusterStatements:
    """Says statements so that they hold on every server of a cluster.

    Args:
        cluster: Its name in the servers' configuration; an identifier.
        database: The tables' database; an identifier.
    """

    def __init__(self, *, cluster: str, database: str) -> None:
        self._on_cluster = f"ON CLUSTER `{cluster}`"
        self._cluster = cluster
        self._database = database

    def of(self, sql: str, parameters: Mapping[str, Any] | None = None) -> tuple[Statement, ...]:
        """Return what to run instead of ``sql``, in this order; queries stay as they are.

        Raises:
            ClusterStatementError: It is none of the forms that are known.
        """
        text = sql.strip()
        if text.split(None, 1)[0].upper() in UNCHANGED:
            return (Statement(sql=sql, parameters=parameters),)
        for form, said in (
            (CREATE, self._create),
            (ALTER, self._alter),
            (DELETE, self._delete),
            (WHOLE, self._whole),
            (DROP, self._drop),
        ):
            match = form.fullmatch(text)
            if match:
                return tuple(
                    Statement(sql=statement, parameters=_localised(parameters, match))
                    for statement in said(match)
                )
        raise ClusterStatementError(sql, "no known form of a statement that changes tables")

    def table_here(self, table: str) -> str:
        """Return the name of the local table; ``table`` itself holds no rows."""
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

    def _alter(self, match: re.Match[str]) -> tuple[str, ...]:
        kinds = {" ".join(part.split()[:2]).upper() for part in _top_level(match["rest"])}
        if kinds & BOTH_TABLES and kinds - BOTH_TABLES:
            raise ClusterStatementError(match[0], "columns and other changes in one ALTER")
        if kinds & BOTH_TABLES and match["bound"]:
            raise ClusterStatementError(match[0], "columns of a table whose name is bound")
        names = [self._local(match["table"])]
        if kinds & BOTH_TABLES:  # after the local one: nothing is asked for before it is there
            names.append(_quoted(self._database, match["table"]))
        return tuple(
            " ".join(("ALTER TABLE", name, self._on_cluster, match["rest"])) for name in names
        )

    def _delete(self, match: re.Match[str]) -> tuple[str, ...]:
        # One server can be asked later how far it is; a cluster is waited for at once.
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
        # A bound name gets its suffix where it is bound.
        return _quoted(self._database, table if "{" in table else table + LOCAL_SUFFIX)


def sharding_key(order: str) -> str:
    """Return the expression that chooses a row's shard, from its table's ``ORDER BY``."""
    ordered = re.findall(r"\w+", order)
    columns = [name for name in SHARDING_COLUMNS if name in ordered]
    return f"cityHash64({', '.join(columns)})" if columns else "0"


def _localised(
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
    """Split at the commas that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in commands:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
