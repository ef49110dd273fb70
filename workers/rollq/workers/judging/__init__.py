"""Rewards of samples: built-in judges, custom judges, and processes for judges."""
