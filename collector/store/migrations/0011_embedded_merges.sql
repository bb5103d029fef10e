-- Settings of the embedded engine only; a server keeps its own.
--
-- Replaced parts are removed by the thread that finds them. By default the engine removes more than a
-- hundred at once with 128 threads, and keeps the threads and the freed memory that each has cached:
-- 120 threads and some 25 MiB from the first minute on.
--
-- No statistics of columns: no query of ours uses them, and merges of spans build them. Inserting and
-- merging five million spans took 17, 18 and 16 s of CPU time with them, 16, 14 and 13 without.
-- Existing parts keep theirs until they are merged.

ALTER TABLE attempts
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE bad_rows
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE clock
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE closed_steps
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE deletions
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE events
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE expired
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE findings
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE groups
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE heartbeats
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE ledger
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE manifests
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE microbatches
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE owners
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE pictures
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE ranks
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE rollups
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE runs
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE samples
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE spans
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE steps
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
