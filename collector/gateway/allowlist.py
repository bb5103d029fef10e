"""Functions and tables that statements may use: those that compute, and the store's own tables.

The lists name what is allowed. A function of a later engine is refused until it is added here,
unless it is in a category whose functions only compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


CATEGORIES = frozenset(
    {
        "Arithmetic", "Arrays", "Bit", "Bitmap", "Comparison", "Conditional", "Dates and Times",
        "Distance", "Encoding", "Hash", "IP Address", "JSON", "Logical", "Map", "Mathematical",
        "Null", "Random Number", "Rounding", "String", "String Replacement", "String Search",
        "String Splitting", "Time Window", "Tuple", "Type Conversion", "URL", "UUID",
    }
)  # fmt: skip
"""Categories of ``system.functions`` whose functions compute from their arguments alone."""

OTHER_FUNCTIONS = frozenset(
    {
        "_CAST", "bar", "byteSize", "caseWithExpression", "countDigits", "currentDatabase",
        "currentUser", "defaultValueOfArgumentType", "digits", "displayName",
        "finalizeAggregation", "formatReadableDecimalSize", "formatReadableQuantity",
        "formatReadableSize", "formatReadableTimeDelta", "getSizeOfEnumType", "identity",
        "ignore", "indexHint", "initializeAggregation", "isConstant",
        "isDecimalOverflow", "lowCardinalityIndices", "lowCardinalityKeys", "materialize",
        "neighbor", "parseReadableSize", "parseReadableSizeOrNull", "parseReadableSizeOrZero",
        "parseTimeDelta", "revision", "rowNumberInAllBlocks", "rowNumberInBlock",
        "runningAccumulate", "runningDifference", "toColumnTypeName", "toTypeName", "transform",
        "version", "visibleWidth",
    }
)  # fmt: skip
"""Allowed functions of the mixed categories "Other" and "Internal".

``displayName`` returns the host name. It is allowed because the Go driver calls it on connecting.
"""

FORBIDDEN = frozenset({"formatrow", "formatrownonewline"})
"""Functions of allowed categories that can load a schema file."""

PARSER_FUNCTIONS = frozenset({"lambda", "exists", "grouping", "cast", "in", "view"})
"""Names that the parser makes of syntax; they are not in ``system.functions``."""

TABLE_FUNCTIONS = frozenset(
    {"numbers", "numbers_mt", "zeros", "zeros_mt", "generateseries", "generate_series", "values",
     "view", "null", "sqlstandardvalues"}
)  # fmt: skip
"""Table functions that generate rows. All others read something."""

SELECT_FUNCTIONS = """
SELECT name, is_aggregate, alias_to, categories FROM system.functions WHERE origin = 'System'
"""
SELECT_COMBINATORS = "SELECT name FROM system.aggregate_function_combinators"

OWN_DATABASE = "default"
"""Database of the embedded store's tables."""

SYSTEM_TABLES = frozenset(
    {
        "aggregate_function_combinators", "columns", "contributors", "data_type_families",
        "databases", "formats", "functions", "licenses", "numbers", "numbers_mt", "one",
        "settings", "table_functions", "tables", "time_zones", "zeros", "zeros_mt",
    }
)  # fmt: skip
"""Tables of database ``system`` that clients query and that describe only the engine. The others
show users, queries, logs, the host or its files."""

OTHER_DATABASES = frozenset({"system", "information_schema"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Allowed functions, all names in lower case."""

    scalar: frozenset[str]
    aggregate: frozenset[str]
    combinators: tuple[str, ...]
    """Suffixes of aggregate functions: ``If``, ``Array``, ``State``, ..."""

    def allows(self, name: str) -> bool:
        """Return whether a statement may call ``name``, in any case."""
        lower = name.lower()
        return lower in self.scalar or self._is_aggregate(lower)

    def _is_aggregate(self, name: str) -> bool:
        if name in self.aggregate:
            return True
        return any(
            self._is_aggregate(name.removesuffix(ending))
            for ending in self.combinators
            if name.endswith(ending) and len(name) > len(ending)
        )


def allowed_functions(
    rows: Iterable[Mapping[str, Any]], *, combinators: Iterable[str]
) -> Functions:
    """Return the allowed functions of an engine.

    Args:
        rows: Result of `SELECT_FUNCTIONS`.
        combinators: Names of the engine's aggregate combinators.
    """
    known = {row["name"]: row for row in rows}
    allowed = {name for name, row in known.items() if _is_allowed(row, known)}
    # Some names match in any case: a name that is refused in one spelling is refused in all.
    barred = {name.lower() for name in known.keys() - allowed} | FORBIDDEN
    lower = {name.lower() for name in allowed} - barred
    aggregate = {name.lower() for name in allowed if known[name]["is_aggregate"]} & lower
    return Functions(
        scalar=frozenset(lower - aggregate) | PARSER_FUNCTIONS,
        aggregate=frozenset(aggregate),
        combinators=tuple(sorted(name.lower() for name in combinators)),
    )


def _is_allowed(row: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> bool:
    target = known.get(row["alias_to"], row)
    return bool(
        target["is_aggregate"]
        or target["categories"] in CATEGORIES
        or target["name"] in OTHER_FUNCTIONS
    )


def may_read(name: str) -> bool:
    """Return whether a table may be read.

    Args:
        name: Name as the parser shows it: ``spans``, ``default.spans``, ``system.tables``. A name
            without a database is a table of the store or of the statement's ``WITH``.
    """
    database, dot, table = name.partition(".")
    if not dot:
        return True
    if database == OWN_DATABASE:
        return True
    return database == "system" and table in SYSTEM_TABLES


def may_name(name: str) -> bool:
    """Return whether an identifier is allowed in a place that accepts tables too (``x IN name``).

    Args:
        name: ``a``, ``alias.column``, ``database.table`` or ``database.table.column``.
    """
    parts = name.split(".")
    if parts[0].lower() not in OTHER_DATABASES:
        return True
    return len(parts) > 1 and may_read(".".join(parts[:2]))
