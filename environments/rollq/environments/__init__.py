"""Environments: tasks with prompts and graders from packages, servers and folders, each named in one line."""
