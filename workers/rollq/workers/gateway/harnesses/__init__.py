"""Harnesses: agents in processes of a worker, and agents elsewhere."""
