"""Queries over groups: the language that users write them in, the reads that a query needs, and the calls that answer
queries."""
