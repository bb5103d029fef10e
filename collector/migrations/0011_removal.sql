-- Parts that merges have replaced are removed by the thread that looks for them. As it comes, the
-- engine removes more than a hundred at once by 128 threads, and keeps them and what each has cached
-- of freed memory: 120 threads and some 25 MiB from the first minute of an embedded store on.

ALTER TABLE attempts MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE bad_rows MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE clock MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE closed_steps MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE deletions MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE events MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE expired MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE findings MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE groups MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE heartbeats MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE ledger MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE manifests MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE microbatches MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE owners MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE pictures MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE ranks MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE rollups MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE runs MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE samples MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE spans MODIFY SETTING concurrent_part_removal_threshold = 1000000;
ALTER TABLE steps MODIFY SETTING concurrent_part_removal_threshold = 1000000;
