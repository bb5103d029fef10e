-- Data around the spans. A sample's run_id is "" if it is of a host, whatever runs there; its device
-- is the local rank, -1 for the host as a whole. Equal manifests are one row: the ranks of a healthy
-- job share it, by ranks.manifest_hash.

CREATE TABLE IF NOT EXISTS samples (
    run_id LowCardinality(String),
    host LowCardinality(String),
    device Int32,
    at_ns Int64 CODEC(Delta, LZ4),
    name LowCardinality(String),
    value Float64
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, name, host, device, at_ns)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS manifests (
    run_id LowCardinality(String),
    manifest_hash String,
    settings Map(LowCardinality(String), String)
) ENGINE = ReplacingMergeTree
ORDER BY (run_id, manifest_hash)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;
