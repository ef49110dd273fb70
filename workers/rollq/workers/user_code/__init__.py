"""Calls of user-written functions: in threads, within bounds, watched, with their errors in one line."""
