"""Which tables a statement from outside may read."""

from __future__ import annotations

OWN_DATABASE = "default"
"""Where the embedded store keeps its tables."""

SYSTEM_TABLES = frozenset(
    {
        "aggregate_function_combinators", "columns", "contributors", "data_type_families",
        "databases", "formats", "functions", "licenses", "numbers", "numbers_mt", "one",
        "settings", "table_functions", "tables", "time_zones", "zeros", "zeros_mt",
    }
)  # fmt: skip
"""Tables of database ``system`` that clients ask for and that tell of the engine alone. The
others tell of users, queries, logs, the host or its files."""

OTHER_DATABASES = frozenset({"system", "information_schema"})


def may_read(name: str) -> bool:
    """Tell whether a table may be read.

    Args:
        name: As the parser shows it: ``spans``, ``default.spans``, ``system.tables``. A name
            without a database is a table of the store or of the statement's own ``WITH``.
    """
    database, dot, table = name.partition(".")
    if not dot:
        return True
    if database == OWN_DATABASE:
        return True
    return database == "system" and table in SYSTEM_TABLES


def may_name(name: str) -> bool:
    """Tell whether a column may be called so where a table could stand as well (``x IN name``).

    Args:
        name: ``a``, ``alias.column``, ``database.table`` or ``database.table.column``.
    """
    parts = name.split(".")
    if parts[0].lower() not in OTHER_DATABASES:
        return True
    return len(parts) > 1 and may_read(".".join(parts[:2]))
