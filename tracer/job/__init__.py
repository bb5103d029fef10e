"""The job as the tracer records it: identity, manifest, FLOPs, profiles, stacks of slow steps."""
