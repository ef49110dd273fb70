"""The rules of a task, and decisions that follow from them. Nothing here talks to a server."""
