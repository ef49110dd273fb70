"""Observes a run: records of its steps, readings of its buffer, a live view, status tables and a report."""
