"""The instrumented parallel trainer and its faults."""
