"""Calls user-written functions in threads, limits and watches them, and describes their errors in one line."""
