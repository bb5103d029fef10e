"""One module for each training framework. Each imports its own framework only."""
