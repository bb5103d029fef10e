-- Sums of a step, computed when it is closed, and again when late rows of it come. revision counts
-- the rows that a computation used: rows are only added, so of two computations the fuller one stays.
-- wait_ns and transfer_ns are sums over the spans that could be split; num_unsplit counts the others.

CREATE TABLE IF NOT EXISTS rollups (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32 CODEC(Delta, LZ4),
    rank Int32 CODEC(Delta, LZ4),
    kind LowCardinality(String),
    num_spans UInt32,
    num_unsplit UInt32,
    busy_ns Int64,
    wait_ns Int64,
    transfer_ns Int64,
    exposed_ns Int64,
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, step, rank, kind)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Inputs of a step's rollups and pictures, written after them. num_described counts the epoch's
-- groups and ranks, which decide on waits and on the order of lines.

CREATE TABLE IF NOT EXISTS closed_steps (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32 CODEC(Delta, LZ4),
    begin_ns Int64,
    end_ns Int64,
    num_spans UInt64,
    num_ranks UInt32,
    num_described UInt32,
    at_ns Int64,
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, step)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Pictures of steps that have too many spans to draw each: a row of pixels for each block of
-- neighbouring ranks in one order. A level cuts the step into 4^level tiles of equal length.
-- fill is the covered share of a pixel in 1/200, 255 at most; kind is a code, -1 for none.

CREATE TABLE IF NOT EXISTS pyramid (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32,
    ordering LowCardinality(String),
    level UInt8,
    tile UInt32,
    line UInt32,
    ranks Array(Int32) CODEC(Delta, ZSTD(1)),
    compute_kind Array(Int8) CODEC(ZSTD(1)),
    compute_fill Array(UInt8) CODEC(ZSTD(1)),
    comm_kind Array(Int8) CODEC(ZSTD(1)),
    comm_fill Array(UInt8) CODEC(ZSTD(1)),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, step, ordering, level, tile, line)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
