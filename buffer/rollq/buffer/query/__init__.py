"""Queries over groups: the language that users write, the reads it becomes, and the calls that answer it."""
