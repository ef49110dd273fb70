"""Where large frames of groups are kept outside their task's slot: a cluster, a folder, an object store."""
