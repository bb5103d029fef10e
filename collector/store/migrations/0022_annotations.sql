-- What people add to runs. The text is the identity: the same tag again, or its removal, is a later row
-- that replaces the earlier one.

CREATE TABLE IF NOT EXISTS annotations (
    run_id LowCardinality(String) COMMENT 'Name of the run',
    kind LowCardinality(String) COMMENT 'tag or note',
    text String COMMENT 'The tag, or the note',
    author String COMMENT 'Who wrote or removed it; empty: unknown',
    at_ns Int64 COMMENT 'When, Unix ns',
    is_removed UInt8 COMMENT '1 if it was removed'
) ENGINE = ReplacingMergeTree(at_ns)
ORDER BY (run_id, kind, text)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
ALTER TABLE annotations
    MODIFY COMMENT 'Tags and notes that people add to runs; read it with FINAL';
