"""rollq in other projects' trainers. Each has a package here, and an extra of the same name to install."""
