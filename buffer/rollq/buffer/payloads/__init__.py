"""Stores large frames outside their task's slot: on a cluster, in a folder, or in an object store."""
