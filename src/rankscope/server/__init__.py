"""What `rankscope serve` and `rankscope agent` run."""
