-- Tombstones of deleted runs, written before the first row is removed, and kept. Rows of such a run
-- are no longer accepted, and those that came in between are not shown.

CREATE TABLE IF NOT EXISTS deletions (
    run_id LowCardinality(String),
    at_ns Int64,
    reason LowCardinality(String),
    done_ns Nullable(Int64),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY run_id
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Expired spans: those of an epoch's steps up to last_step, except of the steps from kept_first[i] to
-- kept_last[i].

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
