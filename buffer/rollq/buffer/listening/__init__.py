"""Servers that strangers can reach: how many connections they accept, from whom, and for how long."""
