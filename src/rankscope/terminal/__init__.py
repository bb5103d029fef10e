"""Output for a person at a terminal: lines, tables, and the diagnosis as text."""
