"""`rollq demo`: a tiny model trained here, with all roles run by one command."""
