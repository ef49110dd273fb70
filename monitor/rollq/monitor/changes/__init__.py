"""Calls a command when the state of a run changes: when a change counts, the command, and the thread that watches."""
