"""`rollq doctor`: facts about a run's servers and folders, the checks that turn them into findings, and the report."""
