"""The status of a run: its reading, its diagnosis and its text."""
