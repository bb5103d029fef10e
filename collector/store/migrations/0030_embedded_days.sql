-- As in 0011, for the tables of 0028.

ALTER TABLE spans
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE kept_spans
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE step_spans
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE ledger
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE merged_ledger
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE run_totals
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE segment_totals
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
ALTER TABLE leases
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
