"""From the rank's spool to a queryable row in ClickHouse."""
