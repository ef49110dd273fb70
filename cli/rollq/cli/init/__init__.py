"""`rollq init`: a folder to start a run from."""
