"""Reader of the trace format that ByteDance published."""
