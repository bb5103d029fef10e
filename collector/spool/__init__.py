"""Read what traced processes write to the spool of a host."""
