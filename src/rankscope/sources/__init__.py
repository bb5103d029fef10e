"""Sources of spans for the analysis: a store, a simulation, a trace file."""
