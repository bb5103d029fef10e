-- As in 0011, for the table of 0021.

ALTER TABLE host_changes
    MODIFY SETTING concurrent_part_removal_threshold = 1000000, auto_statistics_types = '';
