"""`rankscope mcp`: runs, verdicts and evidence for an assistant, read-only."""

from .flags import Store, check_exists


def mcp(*, store: Store = None) -> None:
    """Answer an assistant over standard input and output (Model Context Protocol).

    It reads runs, verdicts, evidence and hosts, and changes nothing.
    """
    from rankscope.collector.store.location import default_store_url

    from ..assistant.mcp_server import build_server

    check_exists(store)
    build_server(store or default_store_url()).run("stdio")
