-- As in 0011, for the table of 0023.

ALTER TABLE host_checks
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
