"""The finished diagnosis: its data, its text and its JSON."""
