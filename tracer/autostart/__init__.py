"""The folder that `rankscope run` puts on PYTHONPATH: its one module starts the tracer."""
