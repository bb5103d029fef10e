-- The finished report of each ended run, made once: num_spans to state say of which data, version by
-- which rankscope. What a list of runs shows of it is in columns; body is empty if it was too long.

CREATE TABLE IF NOT EXISTS reports (
    run_id LowCardinality(String),
    version LowCardinality(String),
    num_spans UInt64,
    num_steps UInt64,
    num_rows UInt64,
    state LowCardinality(String),
    at_ns Int64,
    cause LowCardinality(String),
    severity LowCardinality(String),
    ranks Array(Int32),
    verdict String CODEC(ZSTD(1)),
    step_s Nullable(Float64),
    mfu Nullable(Float64),
    loss Nullable(Float64),
    duration_ns Nullable(Int64),
    num_dropped UInt64,
    body String CODEC(ZSTD(3))
) ENGINE = ReplacingMergeTree(at_ns)
ORDER BY run_id
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
