"""The settings in a `rollq.toml`: their model, and the reading of the file."""
