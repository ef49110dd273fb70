"""Everything between rollq and the server: connections, keys, functions, wake-ups, and an embedded server."""
