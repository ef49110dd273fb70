"""The status of a run: how it is read, what is diagnosed, and its text."""
