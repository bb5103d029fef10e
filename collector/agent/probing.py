"""Ask a collector's clock over the link."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from collector.agent.answers import OK
from collector.agent.errors import HeldError
from collector.clock_probe import ProbeReply, parse_reply
from collector.errors import ClockReplyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from collector.agent.link import Link


def exchange_over(link: Link) -> Callable[[], ProbeReply]:
    """Return what sends one probe and returns the reply.

    It raises `OSError` where none came and `ClockReplyError` where it is none, as
    `collector.clock_sync.HostClock` has it.
    """

    def exchange() -> ProbeReply:
        try:
            answer = link.post("/v1/clock", b"", content_type="application/json")
        except HeldError as error:
            raise OSError(error.reason) from error
        if answer.status != OK:
            raise OSError(f"the collector answers {answer.status}")
        try:
            return parse_reply(json.loads(answer.body))
        except (ValueError, RecursionError) as error:
            raise ClockReplyError("it is no JSON") from error

    return exchange
