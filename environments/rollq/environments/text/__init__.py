"""The kind `text`: games and other environments in Python, in child processes."""
