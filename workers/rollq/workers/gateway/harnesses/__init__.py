"""Harnesses run agents, in a worker's processes or elsewhere."""
