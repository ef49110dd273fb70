"""Runs episodes of verifiers for a worker, in a Python that has verifiers. Imports no other part of rollq."""
