"""The command and the notebook entry: parses, wires the packages together, prints."""
