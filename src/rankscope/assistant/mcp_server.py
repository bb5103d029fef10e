"""The answers as tools of the Model Context Protocol, over the official SDK."""

from __future__ import annotations

import functools
import json
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.gateway import QueryError

from ..errors import find_exit_code, format_error
from .answers import Answers

if TYPE_CHECKING:
    from collections.abc import Callable

INSTRUCTIONS = """\
rankscope watches distributed training of large models and says which rank is truly slow, which \
ranks only wait for it, and why. Begin with `runs`, then `verdict` of a run. A rank that waits is \
not slow: name only the ranks and hosts of a finding. `evidence` has the numbers that prove a \
finding. Before you advise to drain a host, read `what_to_do` and `host_checks` of its finding and \
`hosts`; "insufficient-evidence" is an answer, and no proof of health. Times that end in _ns are \
ns, moments among them Unix time; _s are seconds."""

ONLY_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)

Run = Annotated[str, Field(description="Name of the run, as `runs` lists it.")]


def build_server(store_url: str) -> MCPServer:
    """Return the server of the tools.

    The store is opened for each answer and closed after it, so that a long conversation keeps no
    other process from it. While `rankscope serve` holds it, it is read through that server, with
    the token of its user.

    Args:
        store_url: URL of the store.
    """
    server = MCPServer("rankscope", version=version("rankscope"), instructions=INSTRUCTIONS)

    def answer(ask: Callable[[Answers], dict[str, Any]]) -> str:
        try:
            with open_for_reading(store_url, read_only=True) as store:
                return json.dumps(ask(Answers(store, unix_ns=time.time_ns)), default=str)
        except Exception as error:
            if isinstance(error, QueryError) or find_exit_code(error) is not None:
                raise ToolError(format_error(error)) from error
            raise

    tool = functools.partial(server.tool, annotations=ONLY_READS)

    @tool()
    def runs() -> str:
        """List the runs with their verdicts, the newest first."""
        return answer(lambda answers: answers.runs())

    @tool()
    def verdict(run: Run, first_step: int | None = None, last_step: int | None = None) -> str:
        """Diagnose a run, or only some of its steps.

        The answer has the verdict, each finding with its price and what to do, the ranks that wait
        and for whom, goodput, and the quality of the data.
        """
        return answer(
            lambda answers: answers.verdict(run, first_step=first_step, last_step=last_step)
        )

    @tool()
    def evidence(
        run: Run, finding: Annotated[int, Field(ge=0, description="Place in `verdict`.")] = 0
    ) -> str:
        """Prove a finding: its quantity beside that of the peers, and the checks of its hosts."""
        return answer(lambda answers: answers.evidence(run, finding))

    @tool()
    def ranks(run: Run, ranks: list[int] | None = None) -> str:
        """Describe ranks: host, device, position, slowdown, for whom they wait; slowest first."""
        return answer(lambda answers: answers.ranks(run, ranks))

    @tool()
    def hosts() -> str:
        """List what is known against hosts over all runs: errors of checks, repeated findings."""
        return answer(lambda answers: answers.hosts())

    @tool()
    def findings(run: str | None = None) -> str:
        """List recorded findings of a run, or of all runs: onset, end and price."""
        return answer(lambda answers: answers.findings(run))

    @tool()
    def query(sql: str) -> str:
        """Run one ClickHouse statement that reads, for what no other tool answers.

        Tables: runs, ranks, groups, spans, steps, microbatches, samples, events, findings,
        heartbeats; `DESCRIBE TABLE spans` has the columns. At most 100 rows are returned.
        """
        return answer(lambda answers: answers.query(sql))

    return server
