"""`rankscope mcp`: runs, verdicts and evidence for an assistant, read-only."""

from ..errors import BadInputError
from .flags import Store, check_exists


def mcp(*, store: Store = None) -> None:
    """Answer an assistant over standard input and output (Model Context Protocol).

    It reads runs, verdicts, evidence and hosts, and changes nothing.
    """
    from rankscope.collector.store.location import default_store_url

    try:
        from ..assistant.mcp_server import build_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "mcp":
            raise
        raise BadInputError("the package mcp is missing: pip install 'rankscope[mcp]'") from error
    check_exists(store)
    build_server(store or default_store_url()).run("stdio")
