-- Runs that were deleted: the tombstone is written before the first row goes, and stays. Rows of a
-- run that has one are not taken in any more, nor shown where some came in between.

CREATE TABLE IF NOT EXISTS deletions (
    run_id LowCardinality(String),
    at_ns Int64,
    reason LowCardinality(String),
    done_ns Nullable(Int64),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY run_id
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Spans that are kept no longer: of an epoch, those of all steps up to last_step, but of the steps
-- from kept_first[i] to kept_last[i].

CREATE TABLE IF NOT EXISTS expired (
    run_id LowCardinality(String),
    epoch Int32,
    last_step Int32,
    kept_first Array(Int32),
    kept_last Array(Int32),
    at_ns Int64
) ENGINE = ReplacingMergeTree(at_ns)
ORDER BY (run_id, epoch)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
