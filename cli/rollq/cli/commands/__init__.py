"""The commands: one module for each command, or for a few related commands."""
