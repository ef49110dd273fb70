"""Processes that seal themselves: then they can read only Python's files, and write, start and reach nothing."""
