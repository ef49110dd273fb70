"""The kind `verifiers`: task sets of the package verifiers, whose agent loop runs in processes of another Python."""
