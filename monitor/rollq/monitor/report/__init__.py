"""A run's records on disk, its live view in the terminal, and the report of a finished run."""
