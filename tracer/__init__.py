"""The tracer: lives in the training process, records spans, never hurts the job."""
