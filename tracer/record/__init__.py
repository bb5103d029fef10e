"""Recording: from a span to a record in a memory-mapped segment."""
