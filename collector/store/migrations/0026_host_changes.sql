-- What operators say of hosts: excluded, golden, spare. Each change is a row, so the history stays.

CREATE TABLE IF NOT EXISTS host_changes (
    host String COMMENT 'Host name',
    mark LowCardinality(String) COMMENT 'excluded, golden or spare',
    at_ns Int64 COMMENT 'Time of the change, Unix ns; the newest of a host and mark counts',
    is_set Bool COMMENT 'Whether the host has the mark from then on',
    until_ns Nullable(Int64) COMMENT 'Time at which the mark expires, Unix ns; NULL: never',
    reason String COMMENT 'Why, in the words of the user',
    set_by String COMMENT 'User who made the change; empty: unknown'
) ENGINE = ReplacingMergeTree
ORDER BY (host, mark, at_ns)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE host_changes
    MODIFY COMMENT 'Marks that users gave to hosts and took from them: excluded, golden, spare';
