"""A run's buffer in a folder: saving it while production continues, and restoring it."""
