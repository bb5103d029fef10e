"""What fixing a finding would save, by replaying the run without it."""
