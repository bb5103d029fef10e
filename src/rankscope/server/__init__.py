"""Server and agent: the processes behind `rankscope serve` and `rankscope agent`."""
