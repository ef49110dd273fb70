"""Saves a run's buffer to a folder while production continues, and restores it."""
