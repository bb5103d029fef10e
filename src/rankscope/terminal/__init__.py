"""Output on a terminal: lines, tables, progress, and the diagnosis as text."""
