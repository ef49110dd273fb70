"""Harnesses: agents in a worker's processes, and agents elsewhere."""
