"""Cost of findings and of sets of operations, by replaying the run without them."""
