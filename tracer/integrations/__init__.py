"""One short file for each training framework; each imports its framework, and only its own."""
