"""Device timing: marks on the job's streams, mapped to the host's clock."""
