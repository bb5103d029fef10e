"""The same job with the same faults under several tools."""
