-- Who set out to store a cut. A writer puts its attempt here before it looks for the attempts of
-- others, so of two writers of one cut at least one sees the other and notes the cut as repeated.
-- The key ends in the writer: attempts of several never replace one another. An embedded store has
-- one owner and leaves this empty.

CREATE TABLE IF NOT EXISTS attempts (
    run_id LowCardinality(String),
    epoch Int32,
    rank Int32,
    segment UInt64,
    first_row UInt32,
    end_row UInt32,
    sha256 String,
    writer String,
    at_ns Int64
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, rank, segment, first_row, end_row, writer)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
