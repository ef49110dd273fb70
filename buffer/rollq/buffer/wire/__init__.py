"""Encodes samples, prompts and arrays for Redis, and checks them first."""
