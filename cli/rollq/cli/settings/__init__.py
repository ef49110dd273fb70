"""The settings of a `rollq.toml`: their model, and how the file is read."""
