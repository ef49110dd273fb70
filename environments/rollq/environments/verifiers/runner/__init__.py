"""Runs episodes of verifiers for a worker, in a Python that has verifiers. Imports nothing else of rollq."""
