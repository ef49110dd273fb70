"""The `rollq` command: settings, start-up and one module per group of commands."""
