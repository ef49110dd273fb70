"""Limits connections to servers that strangers can reach: how many, from whom, and for how long."""
