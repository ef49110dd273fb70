"""Where large frames of groups are when they are not in their task's slot: a cluster, a folder, an object store."""
