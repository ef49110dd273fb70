"""Plain values that travel between the parts of rollq. Nothing here talks to a server."""
