-- Sums of the kernels that a profiler recorded. Their identity is in the sort key, so a line of a spool
-- that is sent again replaces itself.

CREATE TABLE IF NOT EXISTS kernels (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    epoch Int32 COMMENT 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    step Int32 CODEC(Delta, LZ4) COMMENT 'Optimizer step in which they were launched',
    rank Int32 CODEC(Delta, LZ4) COMMENT 'Global rank',
    phase LowCardinality(String) COMMENT 'forward, backward or optimizer',
    stream LowCardinality(String) COMMENT 'compute, communication or copy',
    name LowCardinality(String)
        COMMENT 'Kernel, without its parameters; other: all beyond the 500 busiest of a rank',
    num Int64 COMMENT 'Launches',
    num_names Int64 DEFAULT 1 COMMENT 'Different names that are summed: more than 1 for other',
    total_ns Int64 COMMENT 'Sum of the durations in ns; kernels of several streams overlap',
    max_ns Int64 COMMENT 'Longest duration in ns',
    flops Nullable(Int64) COMMENT 'FLOPs of all launches; NULL: unknown of some',
    num_bytes Nullable(Int64)
        COMMENT 'Bytes from and to the memory, each operand and result once; NULL: unknown of some',
    dtype LowCardinality(String) COMMENT 'Type of the numbers; empty: unknown'
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, epoch, step, rank, phase, stream, name)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE kernels
    MODIFY COMMENT 'Sums of kernels by step, rank, phase and name, of runs imported from torch.profiler; read it with FINAL';
