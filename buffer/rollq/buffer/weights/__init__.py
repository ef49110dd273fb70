"""Weights on their way to the workers: the manifest that names them, their files in Redis, and the broadcast log."""
