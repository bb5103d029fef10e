-- An agent reports its clock each minute. After two days one row of each boot stays, with the first
-- offset, by which the times of its spools are mapped, and the newest bound of its error.

ALTER TABLE clock MODIFY TTL toDateTime(intDiv(at_ns, 1000000000)) + INTERVAL 2 DAY
    GROUP BY host, boot_id SET
        offset_ns = argMin(offset_ns, at_ns), drift_ppb = argMin(drift_ppb, at_ns),
        clock_error_ns = argMax(clock_error_ns, at_ns), at_ns = min(at_ns);
ALTER TABLE clock
    MODIFY COMMENT 'Alignment of the hosts'' clocks over the last two days; of earlier times one row for each boot';
