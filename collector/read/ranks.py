"""Stored rows of one rank, and one quantity of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.span import COMM_KINDS, SpanFlag

from ..store.deduplicated_reads import read_deduplicated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..identity import Row
    from ..store.store import Store

_COMM = ", ".join(f"'{kind}'" for kind in sorted(COMM_KINDS))
_UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)

SELECT_RANK = """
SELECT epoch, host, local_rank, switch, rack, rail, device_name, exit_state
FROM ranks FINAL WHERE run_id = {run_id:String} AND rank = {rank:Int32}
ORDER BY epoch DESC, started_ns DESC, process DESC LIMIT 1
"""

SELECT_HEARTBEAT = """
SELECT state, step, at_ns FROM heartbeats WHERE run_id = {run_id:String} AND rank = {rank:Int32}
ORDER BY at_ns DESC LIMIT 1
"""

SELECT_REPORTED = """
SELECT max(at_ns) AS at_ns FROM ledger
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND rank IN (-1, {rank:Int32})
"""
"""Rank -1: of all ranks, in an import or a simulation."""

SELECT_KINDS = f"""
SELECT step, kind,
    maxIf(if(kind IN ({_COMM}), exposed_ns, busy_ns), rank = {{rank:Int32}}) AS own_ns,
    countIf(rank = {{rank:Int32}}) AS num_own,
    quantileExactIf(0.5)(if(kind IN ({_COMM}), exposed_ns, busy_ns), rank != {{rank:Int32}})
        AS peers_ns,
    countIf(rank != {{rank:Int32}}) AS num_peers
FROM rollups FINAL
WHERE run_id = {{run_id:String}} AND epoch = {{epoch:Int32}}
    AND step >= {{first:Int32}} AND step <= {{last:Int32}} AND rank IN {{ranks:Array(Int32)}}
GROUP BY step, kind ORDER BY kind, step
"""  # noqa: S608  # constants

SELECT_BOUNDS = """
SELECT step, begin_ns, end_ns FROM closed_steps FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step >= 0
ORDER BY step DESC LIMIT {most:UInt32}
"""

SELECT_SAMPLES = """
SELECT name, device, intDiv(at_ns - {first_ns:Int64}, {width_ns:Int64}) AS bucket,
    avg(value) AS mean, max(value) AS highest, max(at_ns) AS last_ns
FROM samples FINAL
WHERE run_id IN ({run_id:String}, '') AND host = {host:String}
    AND device IN (-1, {device:Int32}) AND at_ns >= {first_ns:Int64} AND at_ns <= {last_ns:Int64}
GROUP BY name, device, bucket ORDER BY name, device, bucket
"""

SELECT_PEER_SAMPLES = """
WITH
    placed AS (
        SELECT DISTINCT host, local_rank FROM ranks FINAL
        WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND rank IN {ranks:Array(Int32)}
    ),
    sampled AS (
        SELECT host, name, device, intDiv(at_ns - {first_ns:Int64}, {width_ns:Int64}) AS bucket,
            avg(value) AS mean, max(value) AS highest, max(at_ns) AS last_ns
        FROM samples FINAL
        WHERE run_id IN ({run_id:String}, '') AND host IN (SELECT host FROM placed)
            AND at_ns >= {first_ns:Int64} AND at_ns <= {last_ns:Int64}
            AND if(device = -1, host != {host:String}, (host, device) IN (SELECT * FROM placed))
        GROUP BY host, name, device, bucket
    ),
    changed AS (
        SELECT name, device, bucket, mean, row_number() OVER before AS place,
            (highest - lagInFrame(highest) OVER before)
            / greatest(last_ns - lagInFrame(last_ns) OVER before, 1) * 1e9 AS rate
        FROM sampled WINDOW before AS (
            PARTITION BY host, name, device ORDER BY bucket
            ROWS BETWEEN 1 PRECEDING AND CURRENT ROW
        )
    )
SELECT name, device >= 0 AS is_device, bucket, median(mean) AS mean,
    medianIf(rate, place > 1 AND rate >= 0) AS rate
FROM changed GROUP BY name, is_device, bucket
"""

SELECT_EVENTS = """
SELECT at_ns, kind, text, substring(data, 1, {most_bytes:UInt32}) AS data,
    count() OVER (PARTITION BY kind) AS num_alike
FROM events FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND (
    rank = {rank:Int32}
    OR (rank = -1 AND kind IN ('kernel', 'log') AND JSONExtractString(data, 'host') = {host:String})
)
ORDER BY at_ns DESC, line DESC LIMIT {most_alike:UInt32} BY kind LIMIT {most:UInt32}
"""

SELECT_UNFINISHED = f"""
SELECT name, kind, step, start_ns, group_id FROM spans
WHERE run_id = {{run_id:String}} AND epoch = {{epoch:Int32}} AND rank = {{rank:Int32}}
    AND step >= {{first:Int32}} AND bitAnd(flags, {_UNFINISHED}) != 0
ORDER BY start_ns DESC LIMIT {{most:UInt32}}
"""  # noqa: S608  # constants

SELECT_GROUPS = """
SELECT group_id, name, kind, arraySlice(members, 1, {most:UInt32}) AS members,
    length(groups.members) AS num_members
FROM groups FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND has(groups.members, {rank:Int32})
ORDER BY num_members, kind, name
"""

SELECT_HOST_FINDINGS = """
SELECT run_id, position, cause, ranks, first_step, last_step, analysed_ns, closed_ns
FROM findings FINAL INNER JOIN (
    SELECT run_id, epoch, groupUniqArray(rank) AS mine FROM ranks FINAL
    WHERE host = {host:String} GROUP BY run_id, epoch
) AS placed USING (run_id, epoch)
WHERE length(ranks) <= {most_ranks:UInt32} AND hasAny(ranks, mine)
ORDER BY analysed_ns DESC, position LIMIT {most:UInt32}
"""

SELECT_VALUES = """
SELECT rank, sum(multiIf({column:String} = 'wait', wait_ns, {column:String} = 'exposed', exposed_ns,
    busy_ns)) AS total_ns
FROM rollups FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND kind IN {kinds:Array(String)}
    AND step >= {first:Int32} AND step <= {last:Int32}
GROUP BY rank ORDER BY rank
"""

SELECT_HOSTS = """
SELECT rank, argMax(host, (started_ns, process)) AS host,
    argMax(switch, (started_ns, process)) AS switch
FROM ranks FINAL WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} GROUP BY rank
"""


def read_rank(store: Store, run_id: str, rank: int) -> Row | None:
    """Return epoch, place and state of a rank's newest process; None if it is unknown."""
    rows = store.rows(SELECT_RANK, {"run_id": run_id, "rank": rank})
    return rows[0] if rows else None


def read_heartbeat(store: Store, run_id: str, rank: int) -> Row | None:
    """Return state, step and time of a rank's last heartbeat; None if there is none."""
    rows = store.rows(SELECT_HEARTBEAT, {"run_id": run_id, "rank": rank})
    return rows[0] if rows else None


def read_reported(store: Store, run_id: str, rank: int, *, epoch: int) -> int | None:
    """Return the Unix time at which a rank's newest record was stored; None if none was."""
    rows = store.rows(SELECT_REPORTED, {"run_id": run_id, "rank": rank, "epoch": epoch})
    return rows[0]["at_ns"] or None


def read_closed_bounds(store: Store, run_id: str, epoch: int, *, most: int) -> list[Row]:
    """Return step, begin and end of an epoch's newest closed steps, by step."""
    return store.rows(SELECT_BOUNDS, {"run_id": run_id, "epoch": epoch, "most": most})[::-1]


def read_rank_kinds(
    store: Store,
    run_id: str,
    rank: int,
    *,
    epoch: int,
    steps: tuple[int, int],
    peers: Sequence[int],
) -> list[Row]:
    """Return the time of a rank and the median of its peers, by kind and step.

    Of communication, the time that no compute hides.
    """
    bound = {"run_id": run_id, "rank": rank, "epoch": epoch, "ranks": [rank, *peers]}
    return store.rows(SELECT_KINDS, bound | {"first": steps[0], "last": steps[1]})


def read_rank_samples(
    store: Store, run_id: str, *, host: str, device: int, span_ns: tuple[int, int], buckets: int
) -> list[Row]:
    """Return readings of a host and of one of its devices, joined in equal stretches of time.

    Args:
        device: Local rank of the device.
        span_ns: First and last Unix time.
        buckets: Number of stretches.

    Returns:
        Rows of ``name, device, bucket, mean, highest, last_ns``.
    """
    first_ns, last_ns = span_ns
    width_ns = max(1, -(-(last_ns - first_ns + 1) // buckets))
    bound = {"run_id": run_id, "host": host, "device": device}
    times = {"first_ns": first_ns, "last_ns": last_ns, "width_ns": width_ns}
    return store.rows(SELECT_SAMPLES, bound | times)


def read_peer_samples(  # noqa: PLR0913  # whose, and when
    store: Store,
    run_id: str,
    *,
    epoch: int,
    ranks: Sequence[int],
    host: str,
    span_ns: tuple[int, int],
    buckets: int,
) -> list[Row]:
    """Return the medians of the devices of some ranks, and of their hosts but one.

    Args:
        host: The host that is left out.
        span_ns: First and last Unix time.
        buckets: As of `read_rank_samples`.

    Returns:
        Rows of ``name, is_device, bucket, mean, rate``: the growth of a counter per second.
    """
    first_ns, last_ns = span_ns
    width_ns = max(1, -(-(last_ns - first_ns + 1) // buckets))
    bound = {"run_id": run_id, "epoch": epoch, "ranks": [*ranks], "host": host}
    times = {"first_ns": first_ns, "last_ns": last_ns, "width_ns": width_ns}
    return store.rows(SELECT_PEER_SAMPLES, bound | times)


def read_rank_events(  # noqa: PLR0913  # three limits
    store: Store,
    run_id: str,
    rank: int,
    *,
    epoch: int,
    host: str,
    most: int,
    most_alike: int,
    most_bytes: int,
) -> list[Row]:
    """Return the newest events of each kind of a rank and of its host's logs, the newest first.

    Args:
        host: Its host; "" if it is unknown.
        most_alike: Largest number of one kind.
        most_bytes: Bytes of an event's data that are read.

    Returns:
        Rows of ``at_ns, kind, text, data, num_alike``, the number of events of the kind.
    """
    bound = {"run_id": run_id, "rank": rank, "epoch": epoch, "host": host}
    limits = {"most": most, "most_alike": most_alike, "most_bytes": most_bytes}
    return store.rows(SELECT_EVENTS, bound | limits)


def read_unfinished(
    store: Store, run_id: str, rank: int, *, epoch: int, first: int, most: int
) -> list[Row]:
    """Return a rank's spans that had not ended, from a step on, the newest first."""
    bound = {"run_id": run_id, "rank": rank, "epoch": epoch, "first": first, "most": most}
    return read_deduplicated(store, store.rows, SELECT_UNFINISHED, bound)


def read_rank_groups(store: Store, run_id: str, rank: int, *, epoch: int, most: int) -> list[Row]:
    """Return the groups of a rank, the smallest first, with their first ``most`` members."""
    bound = {"run_id": run_id, "rank": rank, "epoch": epoch, "most": most}
    return store.rows(SELECT_GROUPS, bound)


def read_host_findings(store: Store, host: str, *, most: int, most_ranks: int) -> list[Row]:
    """Return the newest findings of all runs that name a rank on a host."""
    return store.rows(SELECT_HOST_FINDINGS, {"host": host, "most": most, "most_ranks": most_ranks})


def read_rank_values(
    store: Store,
    run_id: str,
    *,
    epoch: int,
    kinds: Sequence[str],
    column: str,
    steps: tuple[int, int],
) -> dict[int, int]:
    """Return the sum of one column of the rollups by rank.

    Args:
        kinds: Kinds of spans that count.
        column: "wait", "exposed" or "busy".
        steps: First and last step.
    """
    bound = {"run_id": run_id, "epoch": epoch, "kinds": list(kinds), "column": column}
    rows = store.rows(SELECT_VALUES, bound | {"first": steps[0], "last": steps[1]})
    return {row["rank"]: row["total_ns"] for row in rows}


def read_hosts(store: Store, run_id: str, epoch: int) -> dict[int, tuple[str, str]]:
    """Return host and switch of each rank of an epoch."""
    rows = store.rows(SELECT_HOSTS, {"run_id": run_id, "epoch": epoch})
    return {row["rank"]: (row["host"], row["switch"]) for row in rows}
