-- Spans and the ledger in partitions of a day, which are dropped whole. Both get their partitions by a
-- copy: the tables are exchanged when it is complete, so an interrupted copy loses nothing and is made
-- again. A span's day is that of its begin, unless that is more than a day from its arrival, as in a
-- trace that is imported: then it is the day of its arrival.
--
-- All columns use ZSTD now, durations too: 9.3 -> 9.0 bytes a span of a simulated cluster of 64 ranks,
-- CPU time of inserts unchanged within noise.
--
-- The copy with its views comes first, because they must not count the copied rows once more.

DROP TABLE IF EXISTS ledger_to_runs SYNC;
DROP TABLE IF EXISTS ledger_to_segments SYNC;
DROP TABLE IF EXISTS steps_to_runs SYNC;
DROP TABLE IF EXISTS events_to_runs SYNC;

ALTER TABLE spans
    ADD COLUMN IF NOT EXISTS day Int32 DEFAULT intDiv(start_ns, 86400000000000);

DROP TABLE IF EXISTS spans_by_day SYNC;

CREATE TABLE IF NOT EXISTS spans_by_day (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    step Int32 COMMENT 'Optimizer step; -1: outside any step' CODEC(ZSTD(1)),
    rank Int32 COMMENT 'Global rank' CODEC(Delta, ZSTD(1)),
    start_ns Int64 COMMENT 'Begin, Unix ns, aligned between hosts' CODEC(Delta, ZSTD(1)),
    kind LowCardinality(String) COMMENT 'forward, backward, optimizer, tp-comm, cp-comm, ep-comm, dp-comm, pp-send, pp-recv, wait, host, data, gc, checkpoint or other' CODEC(ZSTD(1)),
    name LowCardinality(String) COMMENT 'Name of the operation, such as all_reduce' CODEC(ZSTD(1)),
    track LowCardinality(String) COMMENT 'Lane of the timeline: a CUDA stream or a thread of the rank' CODEC(ZSTD(1)),
    group_id UInt64 COMMENT 'Group of a communication, or of the one that a wait waits for; 0: none' CODEC(ZSTD(1)),
    seq Int64 COMMENT 'Number of the communication in its group, equal on all members; for p2p in its pair of ranks; -1: none' CODEC(Delta, ZSTD(1)),
    src_rank Int32 COMMENT 'Sending rank of a transfer, global; -1: none' CODEC(ZSTD(1)),
    dst_rank Int32 COMMENT 'Receiving rank of a transfer, global; -1: none' CODEC(ZSTD(1)),
    microbatch Int32 COMMENT 'Micro-batch of the step; -1: none' CODEC(ZSTD(1)),
    chunk Int32 COMMENT 'Model part on the pipeline stage; -1: none' CODEC(ZSTD(1)),
    duration_ns Int64 COMMENT 'Duration in ns; of a communication, the wait for the other members is in it' CODEC(ZSTD(1)),
    launch_ns Int64 COMMENT 'Time at which the host issued the work, Unix ns; -1: unknown' CODEC(Delta, ZSTD(1)),
    num_bytes Int64 COMMENT 'Bytes of a communication on this rank: the larger of what is sent and what is received; -1: unknown' CODEC(ZSTD(1)),
    interval_id Int64 COMMENT 'Equal for the operations that one call issued together; 0: alone' CODEC(ZSTD(1)),
    parent_row Nullable(UInt32) COMMENT 'Row of the enclosing span in the same segment; NULL: none' CODEC(ZSTD(1)),
    flags UInt16 COMMENT 'Bits: 1 async, 2 coalesced, 4 begin and 8 end measured on the device, 16 host clock, 32 open, 64 error, 128 end is an upper bound' CODEC(ZSTD(1)),
    depth Int16 COMMENT 'Nesting below the outermost span of the track, which has 0' CODEC(ZSTD(1)),
    segment UInt64 COMMENT 'File of the spool that the row was in; with row, the identity of a row' CODEC(ZSTD(1)),
    row UInt32 COMMENT 'Number of the record in its segment' CODEC(Delta, ZSTD(1)),
    day Int32 DEFAULT intDiv(start_ns, 86400000000000) COMMENT 'Day since 1970 with which it expires: that of its begin, or of its arrival if that is more than a day from it' CODEC(ZSTD(1))
) ENGINE = ReplacingMergeTree
PARTITION BY day
ORDER BY (run_id, epoch, step, rank, start_ns, segment, row)
PRIMARY KEY (run_id, epoch, step, rank)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

INSERT INTO spans_by_day SELECT spans.* REPLACE(
    toInt32(if(spans.day BETWEEN first_day - 1 AND last_day + 1, spans.day, last_day)) AS day
) FROM spans AS spans LEFT JOIN (
    SELECT run_id, intDiv(min(at_ns), 86400000000000) AS first_day,
        intDiv(max(at_ns), 86400000000000) AS last_day
    FROM ledger GROUP BY run_id
) AS arrived ON spans.run_id = arrived.run_id;

EXCHANGE TABLES spans AND spans_by_day;

DROP TABLE IF EXISTS spans_by_day SYNC;

ALTER TABLE spans
    MODIFY COMMENT 'One row for each piece of work on one track of one rank, of the last days; read it with FINAL';

-- Spans that outlive their day: of the steps around findings, which an older version kept in the table
-- of all, and of imported traces.

CREATE TABLE IF NOT EXISTS kept_spans AS spans ENGINE = ReplacingMergeTree
PARTITION BY day
ORDER BY (run_id, epoch, step, rank, start_ns, segment, row)
PRIMARY KEY (run_id, epoch, step, rank)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

ALTER TABLE kept_spans
    MODIFY COMMENT 'Spans that stay when their day is dropped: those of steps around findings, and imported traces; read it with FINAL';

INSERT INTO kept_spans SELECT spans.* FROM spans AS spans INNER JOIN (
    SELECT run_id, epoch, last_step FROM expired FINAL
) AS past ON spans.run_id = past.run_id AND spans.epoch = past.epoch
WHERE spans.step >= 0 AND spans.step <= past.last_step;

-- What goodput needs of the spans of a whole run, noted when they expire.

CREATE TABLE IF NOT EXISTS step_spans (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    step Int32 COMMENT 'Optimizer step; -1: outside any step' CODEC(Delta, LZ4),
    num_spans UInt64 COMMENT 'Number of its spans' CODEC(ZSTD(1)),
    begin_ns Int64 COMMENT 'Begin of the first span, Unix ns' CODEC(Delta, ZSTD(1)),
    last_begin_ns Int64 COMMENT 'Begin of the last span, Unix ns' CODEC(Delta, ZSTD(1)),
    last_end_ns Int64 COMMENT 'End of the last span that is no garbage collection, Unix ns' CODEC(Delta, ZSTD(1)),
    saving_ns Int64 COMMENT 'Time in which a rank saved a checkpoint, ns' CODEC(ZSTD(1)),
    saving_begin_ns Int64 COMMENT 'Begin of the first save, Unix ns; 0: none' CODEC(ZSTD(1)),
    day Int32 COMMENT 'Of spans outside any step, their day; 0: a step' CODEC(ZSTD(1))
) ENGINE = ReplacingMergeTree(num_spans)
ORDER BY (run_id, epoch, step, day)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE step_spans
    MODIFY COMMENT 'Times of the steps whose spans have expired; read it with FINAL';

-- The ledger by day of the cut. Lines of past days are merged into one for each segment, with day -1.

ALTER TABLE ledger
    ADD COLUMN IF NOT EXISTS day Int32 DEFAULT intDiv(at_ns, 86400000000000);

DROP TABLE IF EXISTS ledger_by_day SYNC;

CREATE TABLE IF NOT EXISTS ledger_by_day (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    rank Int32 COMMENT 'Global rank',
    process String COMMENT 'Id of the process, new with each start',
    segment UInt64 COMMENT 'Number of the spool''s file',
    first_row UInt32 COMMENT 'First row of the cut' CODEC(Delta, LZ4),
    end_row UInt32 COMMENT 'First row after the cut' CODEC(Delta, LZ4),
    sha256 String COMMENT 'Hash of the cut''s rows; empty: of a part of a cut, or of several',
    num_spans UInt32 COMMENT 'Number of its spans',
    num_steps UInt32 COMMENT 'Number of its step records',
    num_microbatches UInt32 COMMENT 'Number of its micro-batch records',
    num_torn UInt32 COMMENT 'Number of records that the process had not completed',
    num_bad UInt32 COMMENT 'Number of impossible records, see bad_rows',
    state LowCardinality(String) COMMENT 'stored; repeated: perhaps stored twice, reads remove duplicates; sent: being written',
    at_ns Int64 COMMENT 'Time of this state, Unix ns' CODEC(Delta, LZ4),
    revision UInt8 COMMENT 'Version of the row: the highest replaces the others of its key',
    day Int32 DEFAULT intDiv(at_ns, 86400000000000) COMMENT 'Day of at_ns since 1970; -1: cuts of past days, merged into one line' CODEC(ZSTD(1))
) ENGINE = ReplacingMergeTree(revision)
PARTITION BY day
ORDER BY (run_id, epoch, rank, segment, first_row)
PRIMARY KEY (run_id, epoch, rank, segment)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

INSERT INTO ledger_by_day SELECT * FROM ledger;

EXCHANGE TABLES ledger AND ledger_by_day;

DROP TABLE IF EXISTS ledger_by_day SYNC;

ALTER TABLE ledger
    MODIFY COMMENT 'One row for each cut: which rows were sent and stored; read it with FINAL';

-- Where the merged lines of a day are made.

CREATE TABLE IF NOT EXISTS merged_ledger AS ledger ENGINE = ReplacingMergeTree(revision)
PARTITION BY day
ORDER BY (run_id, epoch, rank, segment, first_row)
PRIMARY KEY (run_id, epoch, rank, segment)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE merged_ledger
    MODIFY COMMENT 'Merged lines of a day of the ledger, until they replace it; else empty';

-- Sums that lists and loops read instead of the ledger. Views add what each insert has.

CREATE TABLE IF NOT EXISTS run_totals (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    num_spans SimpleAggregateFunction(sum, UInt64) COMMENT 'Stored spans, expired or not',
    num_records SimpleAggregateFunction(sum, UInt64) COMMENT 'Stored spans, steps and micro-batches',
    num_cuts SimpleAggregateFunction(sum, UInt64) COMMENT 'Stored cuts',
    num_repeated SimpleAggregateFunction(sum, UInt64) COMMENT 'Cuts that may be stored twice',
    num_lines SimpleAggregateFunction(sum, UInt64) COMMENT 'Lines of logs',
    first_rank SimpleAggregateFunction(min, Int32) DEFAULT 2147483647 COMMENT 'Lowest rank of a cut; 2147483647: no cut',
    wrote_ns SimpleAggregateFunction(max, Int64) COMMENT 'Time of the last cut, Unix ns',
    steps AggregateFunction(groupBitmap, UInt32) COMMENT 'The recorded steps, as a bitmap: read it with groupBitmapMerge'
) ENGINE = AggregatingMergeTree
ORDER BY (run_id, epoch)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE run_totals
    MODIFY COMMENT 'Sums of each run and epoch, to be summed once more when read';

CREATE TABLE IF NOT EXISTS segment_totals (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    rank Int32 COMMENT 'Global rank',
    segment UInt64 COMMENT 'Number of the spool''s file',
    num_rows SimpleAggregateFunction(sum, UInt64) COMMENT 'Rows of its stored cuts',
    end_row SimpleAggregateFunction(max, UInt32) COMMENT 'First row after the last stored cut',
    num_spans SimpleAggregateFunction(sum, UInt64) COMMENT 'Number of stored spans',
    num_steps SimpleAggregateFunction(sum, UInt64) COMMENT 'Number of stored step records',
    num_microbatches SimpleAggregateFunction(sum, UInt64) COMMENT 'Number of stored micro-batch records',
    num_torn SimpleAggregateFunction(sum, UInt64) COMMENT 'Number of records that the process had not completed',
    num_bad SimpleAggregateFunction(sum, UInt64) COMMENT 'Number of impossible records, see bad_rows'
) ENGINE = AggregatingMergeTree
ORDER BY (run_id, epoch, rank, segment)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE segment_totals
    MODIFY COMMENT 'Sums of the stored cuts of each segment, to be summed once more when read';

TRUNCATE TABLE run_totals;
TRUNCATE TABLE segment_totals;

INSERT INTO run_totals
    (run_id, epoch, num_spans, num_records, num_cuts, num_repeated, first_rank, wrote_ns)
SELECT run_id, epoch, sum(ledger.num_spans), sum(ledger.num_spans + num_steps + num_microbatches),
    count(), countIf(state = 'repeated'), min(rank), max(at_ns)
FROM ledger AS ledger FINAL WHERE state != 'sent' GROUP BY run_id, epoch;

INSERT INTO run_totals (run_id, epoch, steps)
SELECT run_id, epoch, groupBitmapState(toUInt32(step)) FROM steps WHERE step >= 0
GROUP BY run_id, epoch;

INSERT INTO run_totals (run_id, epoch, num_lines)
SELECT run_id, epoch, uniqExact(rank, at_ns, line) FROM events
WHERE kind IN ('kernel', 'log') GROUP BY run_id, epoch;

INSERT INTO segment_totals
SELECT run_id, epoch, rank, segment, sum(ledger.end_row - first_row), max(ledger.end_row),
    sum(num_spans), sum(num_steps), sum(num_microbatches), sum(num_torn), sum(num_bad)
FROM ledger AS ledger FINAL WHERE state != 'sent' AND end_row > first_row
GROUP BY run_id, epoch, rank, segment;

CREATE MATERIALIZED VIEW IF NOT EXISTS ledger_to_runs TO run_totals
AS SELECT run_id, epoch, sum(ledger.num_spans) AS num_spans,
    sum(ledger.num_spans + num_steps + num_microbatches) AS num_records,
    count() AS num_cuts, countIf(state = 'repeated') AS num_repeated, min(rank) AS first_rank, max(at_ns) AS wrote_ns
FROM ledger WHERE state != 'sent' AND day >= 0 GROUP BY run_id, epoch;

CREATE MATERIALIZED VIEW IF NOT EXISTS ledger_to_segments TO segment_totals
AS SELECT run_id, epoch, rank, segment, sum(ledger.end_row - first_row) AS num_rows,
    max(ledger.end_row) AS end_row, sum(ledger.num_spans) AS num_spans,
    sum(ledger.num_steps) AS num_steps, sum(ledger.num_microbatches) AS num_microbatches,
    sum(ledger.num_torn) AS num_torn, sum(ledger.num_bad) AS num_bad
FROM ledger WHERE state != 'sent' AND day >= 0 AND ledger.end_row > first_row
GROUP BY run_id, epoch, rank, segment;

CREATE MATERIALIZED VIEW IF NOT EXISTS steps_to_runs TO run_totals
AS SELECT run_id, epoch, groupBitmapState(toUInt32(step)) AS steps
FROM steps WHERE step >= 0 GROUP BY run_id, epoch;

CREATE MATERIALIZED VIEW IF NOT EXISTS events_to_runs TO run_totals
AS SELECT run_id, epoch, count() AS num_lines
FROM events WHERE kind IN ('kernel', 'log') GROUP BY run_id, epoch;

-- Attempts matter while two collectors may store one cut: for minutes.

ALTER TABLE attempts MODIFY TTL toDateTime(intDiv(at_ns, 1000000000)) + INTERVAL 7 DAY;

-- Which process does the work of the whole store: the live one that has claimed it first.

CREATE TABLE IF NOT EXISTS leases (
    name LowCardinality(String) COMMENT 'The work: upkeep',
    holder String COMMENT 'Process that does it, or that waits to do it: host, process id and a random number',
    since_ns Int64 COMMENT 'When it claimed the work, Unix ns by the clock of the store',
    at_ns Int64 DEFAULT toUnixTimestamp64Nano(now64(9)) COMMENT 'Last sign of life, Unix ns by the clock of the store'
) ENGINE = ReplacingMergeTree(at_ns)
ORDER BY (name, holder)
TTL toDateTime(intDiv(at_ns, 1000000000)) + INTERVAL 1 DAY
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE leases
    MODIFY COMMENT 'Which process does the work that only one does; read it with FINAL';
