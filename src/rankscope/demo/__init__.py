"""The demo: train on this host with a fault, and diagnose the run."""
