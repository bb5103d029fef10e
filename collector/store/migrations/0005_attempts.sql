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

-- Whose a run is: of the claims on one name, the earliest holds. Reads take the least of (at_ns,
-- owner), so two collectors that took in two owners at once agree afterwards on the same one.

CREATE TABLE IF NOT EXISTS owners (
    run_id LowCardinality(String),
    at_ns Int64,
    owner String
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, at_ns, owner)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
