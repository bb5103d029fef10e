"""The compiled part of the tracer, and its Python counterparts."""
