"""What a process knows of its job: identity, manifest, profile, stacks."""
