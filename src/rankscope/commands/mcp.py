"""`rankscope mcp`: runs, verdicts and evidence for an assistant, read-only."""

from .flags import Store, existing_store_url


def mcp(*, store: Store = None) -> None:
    """Answer an assistant over standard input and output (Model Context Protocol).

    It reads runs, verdicts, evidence and hosts, and changes nothing.
    """
    from ..assistant.mcp_server import build_server

    build_server(existing_store_url(store)).run("stdio")
