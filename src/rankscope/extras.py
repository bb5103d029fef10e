"""Version and extras of the installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULES: Mapping[str, frozenset[str]] = {
    "agent": frozenset(
        {"numpy", "psutil", "pyarrow", "pydantic", "pynvml", "rich", "typer", "urllib3"}
    ),
    "server": frozenset(
        {
            "a2wsgi",
            "cachetools",
            "clickhouse_connect",
            "dash",
            "dash_ag_grid",
            "dash_mantine_components",
            "fastapi",
            "flask",
            "h11",
            "networkx",
            "plotly",
            "prometheus_client",
            "pydantic_core",
            "starlette",
            "typing_extensions",
            "uvicorn",
            "yaml",
        }
    ),
    "embedded": frozenset({"chdb"}),
    "alerts": frozenset({"apprise"}),
    "mcp": frozenset({"mcp"}),
    "notebook": frozenset({"pandas"}),
    "trainer": frozenset({"torch"}),
}
"""Modules of other projects by the extra that installs them; the base install has none of them."""

AGENT_COMMANDS = frozenset({"agent", "check-spool", "doctor", "token"})
"""Commands of a host that keeps no store."""

SERVER_SCHEME = "clickhouse://"


def installed_version() -> str:
    """Return the version of rankscope; "unknown" for a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rankscope")
    except PackageNotFoundError:
        return "unknown"


def extra_of(module: str) -> str | None:
    """Return the extra that installs a module; None if it is no package of an extra."""
    return next((extra for extra, modules in MODULES.items() if module in modules), None)


def advise_install(
    error: ModuleNotFoundError, *, user: str, arguments: Sequence[str] = (), store: str = ""
) -> str | None:
    """Return one line that says how to install the module of an error.

    Without a store on a server the advice includes the embedded one, so that what is installed
    next is enough for the whole command.

    Args:
        error: The failed import.
        user: What needs the module, such as "the command".
        arguments: Those of the command line.
        store: URL of the store, if it is known.

    Returns:
        The line; None if the module is no package of an extra.
    """
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra is None:
        return None
    on_server = any(text.startswith(SERVER_SCHEME) for text in (store, *arguments))
    if extra == "agent" and not AGENT_COMMANDS.intersection(arguments[:1]):
        extra = "server"
    if extra == "server" and not on_server:
        extra = "embedded"
    return f'{module} is not installed, and {user} needs it: pip install "rankscope[{extra}]"'
