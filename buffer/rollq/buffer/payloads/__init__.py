"""The places of large frames outside their task's slot: a cluster, a folder, or an object store."""
