-- Run and epoch under which each traced process is stored. They differ from those that the process
-- declares if another job has the same name. The rows outlive a deleted run, like its tombstone: its
-- processes must not come back under another name.

CREATE TABLE IF NOT EXISTS placements (
    declared_run LowCardinality(String),
    declared_epoch Int32,
    stored_run LowCardinality(String),
    stored_epoch Int32,
    rank Int32,
    process String,
    job LowCardinality(String),
    world_size Int32,
    layout LowCardinality(String),
    started_ns Int64,
    at_ns Int64,
    note String
) ENGINE = ReplacingMergeTree
ORDER BY (declared_run, process)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
