"""Orders for many groups, and groups that have left the buffer."""
