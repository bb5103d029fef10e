-- Times are int64 nanoseconds. -1 in an integer column means "unknown", as in tracer/span.py.
-- (run_id, epoch, rank, segment, row) identifies a row (docs/decisions/0010). With fsync,
-- acknowledged rows survive a power cut. LZ4, not ZSTD: a third faster to insert, a fifth larger.

CREATE TABLE IF NOT EXISTS runs (
    run_id LowCardinality(String),
    epoch Int32,
    created_ns Int64,
    started_ns Nullable(Int64),
    ended_ns Nullable(Int64),
    state LowCardinality(String),
    source_format LowCardinality(String),
    world_size Int32,
    layout Map(LowCardinality(String), Int32),
    model String,
    flops_per_token Nullable(Float64),
    flops_convention String,
    paced String,
    manifest String CODEC(ZSTD(3)),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS ranks (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    process String,
    host LowCardinality(String),
    boot_id LowCardinality(String),
    local_rank Int32,
    pod LowCardinality(String),
    device_uuid String,
    device_name LowCardinality(String),
    dtype LowCardinality(String),
    peak_flops_per_s Nullable(Float64),
    dp Int32,
    tp Int32,
    pp Int32,
    cp Int32,
    ep Int32,
    switch LowCardinality(String),
    rack LowCardinality(String),
    rail LowCardinality(String),
    pid Int64,
    manifest_hash String,
    started_ns Nullable(Int64),
    exit_state LowCardinality(String),
    exit_ns Nullable(Int64),
    dropped Map(LowCardinality(String), UInt64),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, rank, process)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS groups (
    run_id LowCardinality(String),
    epoch Int32,
    group_id UInt64,
    kind LowCardinality(String),
    name String,
    members Array(Int32)
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, group_id)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS spans (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32 CODEC(Delta, LZ4),
    rank Int32 CODEC(Delta, LZ4),
    start_ns Int64 CODEC(Delta, LZ4),
    kind LowCardinality(String),
    name LowCardinality(String),
    track LowCardinality(String),
    group_id UInt64,
    seq Int64 CODEC(Delta, LZ4),
    src_rank Int32,
    dst_rank Int32,
    microbatch Int32,
    chunk Int32,
    duration_ns Int64 CODEC(T64, LZ4),
    launch_ns Int64 CODEC(Delta, LZ4),
    num_bytes Int64,
    interval_id Int64,
    parent_row Nullable(UInt32),
    flags UInt16,
    depth Int16,
    segment UInt64,
    row UInt32 CODEC(Delta, LZ4)
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, step, rank, start_ns, segment, row)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS steps (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32 CODEC(Delta, LZ4),
    rank Int32 CODEC(Delta, LZ4),
    start_ns Int64 CODEC(Delta, LZ4),
    end_ns Int64 CODEC(Delta, LZ4),
    num_tokens Int64,
    loss Float64,
    peak_memory_bytes Int64,
    segment UInt64,
    row UInt32 CODEC(Delta, LZ4)
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, step, rank, segment, row)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS microbatches (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32 CODEC(Delta, LZ4),
    rank Int32 CODEC(Delta, LZ4),
    microbatch Int32,
    num_tokens Int64,
    sum_squared_lengths Int64,
    segment UInt64,
    row UInt32 CODEC(Delta, LZ4)
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, step, rank, microbatch, segment, row)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS clock (
    host LowCardinality(String),
    boot_id LowCardinality(String),
    at_ns Int64,
    offset_ns Int64,
    drift_ppb Int64,
    clock_error_ns Int64
) ENGINE = ReplacingMergeTree
ORDER BY (host, boot_id, at_ns)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS events (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    at_ns Int64,
    kind LowCardinality(String),
    text String,
    data String,
    process String,
    line Int64
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, rank, at_ns, process, line)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS findings (
    run_id LowCardinality(String),
    analysed_ns Int64,
    position Int32,
    cause LowCardinality(String),
    ranks Array(Int32),
    first_step Nullable(Int32),
    last_step Nullable(Int32),
    slowdown Nullable(Float64),
    recoverable_ratio Nullable(Float64),
    confidence Float64,
    evidence String
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, analysed_ns, position)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS ledger (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    process String,
    segment UInt64,
    first_row UInt32,
    end_row UInt32,
    sha256 String,
    num_spans UInt32,
    num_steps UInt32,
    num_microbatches UInt32,
    num_torn UInt32,
    num_bad UInt32,
    state LowCardinality(String),
    at_ns Int64,
    revision UInt8
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, rank, segment, first_row)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS bad_rows (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    segment UInt64,
    row UInt32,
    reason LowCardinality(String),
    record String
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, rank, segment, row)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
