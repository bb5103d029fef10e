-- Results of `rankscope doctor`. The time is that of the whole examination, so a row that is sent again
-- replaces itself.

CREATE TABLE IF NOT EXISTS host_checks (
    host LowCardinality(String) COMMENT 'Host name',
    at_ns Int64 CODEC(Delta, ZSTD(1)) COMMENT 'Time of the examination, Unix ns',
    occasion LowCardinality(String)
        COMMENT 'Reason for it: command, before-job, agent-start, job-start, restart, heartbeat, finding or active',
    run_id LowCardinality(String) COMMENT 'Run on the host at that time; empty: none or unknown',
    epoch Int32 DEFAULT -1
        COMMENT 'Incarnation of the job between restarts, from 0; -1: none or unknown',
    section LowCardinality(String) COMMENT 'Part of the host: GPUs, RDMA, NCCL, ...',
    name LowCardinality(String) COMMENT 'Name of the check; see docs/doctor.md',
    part LowCardinality(String) COMMENT 'What deviates, such as GPU 3; empty: the host',
    device LowCardinality(String) COMMENT 'UUID of the GPU; empty: none',
    state LowCardinality(String) COMMENT 'healthy, warning, error or not applicable',
    reason String CODEC(ZSTD(1)) COMMENT 'Sentence with the numbers',
    remedy String CODEC(ZSTD(1)) COMMENT 'What to do; empty: nothing',
    value String CODEC(ZSTD(1)) COMMENT 'What must be equal on all hosts, such as a version'
) ENGINE = ReplacingMergeTree
ORDER BY (host, at_ns, name, part)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE host_checks
    MODIFY COMMENT 'Results of the checks of hosts, one row for each check or deviating part; read it with FINAL';
