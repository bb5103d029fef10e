"""Advice about a finding: the section of docs/findings.md about its cause, for one run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_HOSTS = 2
"""Hosts whose commands are listed: those of more are alike."""

DRAIN = "scontrol"
"""Command that takes a host out of use: listed only if the finding names one host."""

HOST, RANK, RUN = "HOST", "RANK", "RUN"
"""Words of the document that stand for the run's own host, rank and name."""

_PARAGRAPH = re.compile(r"^\*\*(Looks like|Drain|Confirm|Do|Call):\*\* (.*)$", re.MULTILINE)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Next steps about a finding. In the texts, commands and settings are in backticks."""

    drain: str
    """Whether to take the host at fault out of use."""

    confirm: str
    do: str
    call: str
    commands: tuple[str, ...]
    """Lines for a shell, with this run's hosts and ranks; `HOST` stays if no host is known."""

    num_more_hosts: int = 0
    """Hosts at fault that no command names."""

    host: str = ""
    """The host at fault, if it is one and known."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The texts with their names, the first decision first: "Drain node-8?", "Confirm:"."""
        return (
            (f"Drain {self.host or 'a host'}?", self.drain),
            ("Confirm:", self.confirm),
            ("Do:", self.do),
            ("Call:", self.call),
        )


def advise(cause: str, *, run: str, ranks: Sequence[int], hosts: Sequence[str]) -> Advice | None:
    """Return the advice about a cause; None if there is none, as about ``healthy``.

    Args:
        cause: Name of the cause.
        run: Name of the run.
        ranks: Ranks at fault, of which commands name the first.
        hosts: Their hosts; empty if unknown.
    """
    section = _sections().get(cause)
    if section is None:
        return None
    texts, lines = section
    commands: list[str] = []
    for line in lines:
        filled = line.replace(RUN, shlex.quote(run))
        if (RANK in filled and not ranks) or (filled.startswith(DRAIN) and len(hosts) != 1):
            continue
        filled = filled.replace(RANK, str(min(ranks, default="")))
        # A line about no host is the same for all.
        names = [shlex.quote(host) for host in hosts[:MAX_HOSTS]] or [HOST]
        commands += dict.fromkeys(filled.replace(HOST, name) for name in names)
    named = {name: text.replace(f" {RUN} ", f" {run} ") for name, text in texts.items()}
    return Advice(
        drain=named["Drain"],
        confirm=named["Confirm"],
        do=named["Do"],
        call=named["Call"],
        commands=tuple(commands),
        num_more_hosts=max(len(hosts) - MAX_HOSTS, 0) if any(HOST in line for line in lines) else 0,
        host=hosts[0] if len(hosts) == 1 else "",
    )


@cache
def _sections() -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    """Return the paragraphs and the commands of each section, by its title."""
    document = (files(__package__) / "advice.txt").read_text(encoding="utf-8")
    sections = {}
    for section in document.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        texts = {name: _LINK.sub(r"\1", text) for name, text in _PARAGRAPH.findall(body)}
        if {"Drain", "Confirm", "Do", "Call"} <= texts.keys():
            lines = [line for block in _COMMANDS.findall(body) for line in block.splitlines()]
            sections[title] = texts, tuple(lines)
    return sections
