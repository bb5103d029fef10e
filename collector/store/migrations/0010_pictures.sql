-- Pictures of steps that have too many spans to draw each, as tiles of pixels. They replace table
-- pyramid, which had one level. A picture has num_lines lines of pixels, each for line_ranks
-- neighbouring ranks of one ordering. At zoom z the step is cut into 4^z tiles of equal length.
-- depth is 0 for the whole step's picture and 1 for finer ones, which expire with the step's spans.
-- Pixels are stored line by line; kind is a code (-1 for none), fill the covered share in 1/8.
-- A picture is all rows with the revision of its closed step; rows of other revisions are stale.

CREATE TABLE IF NOT EXISTS pictures (
    run_id LowCardinality(String),
    epoch Int32,
    step Int32,
    ordering LowCardinality(String),
    line_ranks UInt32,
    zoom UInt8,
    depth UInt8,
    tile UInt32,
    first_line UInt32,
    num_lines UInt32,
    ranks Array(Int32) CODEC(Delta, ZSTD(1)),
    compute_kind String CODEC(ZSTD(1)),
    compute_fill String CODEC(ZSTD(1)),
    comm_kind String CODEC(ZSTD(1)),
    comm_fill String CODEC(ZSTD(1)),
    revision UInt64
) ENGINE = ReplacingMergeTree(revision)
ORDER BY (run_id, epoch, step, ordering, line_ranks, zoom, tile, first_line)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- orderings: for each ordering, the one whose picture is kept; equal ones are kept once.
-- line_ranks: that of the whole step's picture; 0 if none is kept.

ALTER TABLE closed_steps
    ADD COLUMN IF NOT EXISTS orderings Map(LowCardinality(String), LowCardinality(String)),
    ADD COLUMN IF NOT EXISTS line_ranks UInt32;

DROP TABLE IF EXISTS pyramid;

-- Every step whose spans are kept is closed again, and drawn.

TRUNCATE TABLE closed_steps;
