"""Small tools that any part may use: files, back-off, log lines, user code by name."""
