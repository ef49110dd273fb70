"""Queries over groups: the language in which users write them, the reads that a query needs, and the calls that answer
it."""
