"""Calls a command when the state of a run changes: the rule for changes, the command, and the watching thread."""
