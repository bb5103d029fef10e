-- Writers that are about to store a cut. A writer records its attempt before it reads the attempts
-- of others, so of two writers of one cut at least one sees the other and marks the cut as repeated.
-- The writer is the last column of the key: attempts of several writers never replace one another.
-- An embedded store has one writer, and leaves this table empty.

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

-- Claims to runs: the earliest claim is the owner's. Reads take the smallest (at_ns, owner), so two
-- collectors that accepted two owners at once agree on the same one afterwards.

CREATE TABLE IF NOT EXISTS owners (
    run_id LowCardinality(String),
    at_ns Int64,
    owner String
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, at_ns, owner)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
