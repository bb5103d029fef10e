-- Reports of each rank, once a second: its host, its hardware, its step. After an hour only the newest
-- of each rank and host is kept: merges drop the others, within about another hour.

CREATE TABLE IF NOT EXISTS heartbeats (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    host LowCardinality(String),
    pid Int64 CODEC(ZSTD(1)),
    at_ns Int64 CODEC(Delta, ZSTD(1)),
    address LowCardinality(String),
    pod LowCardinality(String),
    hardware LowCardinality(String),
    local_rank Int32,
    state LowCardinality(String),
    step Int32 CODEC(Delta, ZSTD(1)),
    rdma_sent_bytes Nullable(Int64) CODEC(ZSTD(1)),
    rdma_received_bytes Nullable(Int64) CODEC(ZSTD(1))
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, host, rank, at_ns, pid)
TTL toDateTime(intDiv(at_ns, 1000000000)) + INTERVAL 1 HOUR GROUP BY run_id, host, rank SET
    epoch = argMax(epoch, at_ns), pid = argMax(pid, at_ns), address = argMax(address, at_ns),
    pod = argMax(pod, at_ns), hardware = argMax(hardware, at_ns),
    local_rank = argMax(local_rank, at_ns), state = argMax(state, at_ns),
    step = argMax(step, at_ns), rdma_sent_bytes = argMax(rdma_sent_bytes, at_ns),
    rdma_received_bytes = argMax(rdma_received_bytes, at_ns), at_ns = max(at_ns)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1, merge_with_ttl_timeout = 3600;
