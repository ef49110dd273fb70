"""Plain values that travel between the parts of rollq. They know no server."""
