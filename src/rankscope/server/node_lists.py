"""Node lists for launchers, without excluded hosts: hostfiles, and Slurm's options."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.collector.read.hosts import is_same_host

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

HOST = re.compile(r"(\s*(?:[^\s@#]+@)?)([^\s:#@]+)")
"""User and host of a line: ``node1 slots=8`` (Open MPI, DeepSpeed), ``node1:8`` (MPICH, Horovod),
``user@node1`` or the name alone (pdsh)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """The lines of a hostfile that are kept."""

    lines: tuple[str, ...]
    hosts: tuple[str, ...]
    """Their hosts, in order."""

    removed: tuple[str, ...]
    added: tuple[str, ...]
    """Spare hosts that replace removed ones."""


def filter_hostfile(
    lines: Iterable[str], *, excluded: Collection[str], spares: Sequence[str] = ()
) -> NodeList:
    """Return a hostfile without excluded hosts. Comments and empty lines stay.

    Args:
        excluded: Hosts to leave out.
        spares: Hosts that replace them, one for each, if the file does not have them; the rest of
            the line (slots) is that of the removed one.
    """
    kept: list[str] = []
    hosts: list[str] = []
    removed: dict[str, str] = {}
    for line in lines:
        match = HOST.match(line)
        if match is None:
            kept.append(line)
        elif any(is_same_host(match[2], host) for host in excluded):
            removed.setdefault(match[2], line)
        else:
            kept.append(line)
            hosts.append(match[2])
    free = [
        spare
        for spare in spares
        if not any(is_same_host(spare, host) for host in (*hosts, *removed, *excluded))
    ]
    added = free[: len(removed)]
    for spare, line in zip(added, removed.values(), strict=False):
        kept.append(HOST.sub(rf"\g<1>{spare}", line, count=1))
    return NodeList(
        lines=tuple(kept),
        hosts=(*dict.fromkeys(hosts), *added),
        removed=tuple(removed),
        added=tuple(added),
    )


def slurm_exclude(hosts: Sequence[str]) -> str:
    """Return the option of sbatch and srun that keeps a job off some hosts; "" for none.

    Source: sbatch(1), ``-x, --exclude=<node_name_list>``. Slurm's node names have no domain.
    """
    return f"--exclude={','.join(dict.fromkeys(map(node_name, hosts)))}" if hosts else ""


def slurm_drain(host: str, reason: str) -> str:
    """Return the command that an administrator of Slurm runs to take a host out.

    Source: scontrol(1), ``update NodeName= State=DRAIN Reason=``.
    """
    quoted = shlex.quote(f"rankscope: {reason}")
    return f"scontrol update nodename={shlex.quote(node_name(host))} state=drain reason={quoted}"


def slurm_resume(host: str) -> str:
    """Return the command that gives a drained host back."""
    return f"scontrol update nodename={shlex.quote(node_name(host))} state=resume"


def node_name(host: str) -> str:
    """Return the name of a host without its domain."""
    return host.partition(".")[0]
