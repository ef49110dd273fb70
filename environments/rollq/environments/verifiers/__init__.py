"""The kind `verifiers`: task sets of the package verifiers, whose own loop runs in processes of another Python."""
