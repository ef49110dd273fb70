"""Calls of user-written functions: in threads, with limits, watched, with one-line errors."""
