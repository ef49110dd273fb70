"""A task's rules, and decisions that follow from them. Nothing here talks to a server."""
