"""Processes that seal themselves: afterwards they read no file but Python's, and write, start and reach nothing."""
