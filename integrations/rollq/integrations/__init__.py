"""rollq in the trainers of other projects. Each has a package here, and an extra of the same name to install."""
