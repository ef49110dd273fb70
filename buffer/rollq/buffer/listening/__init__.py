"""Limits for servers that strangers can reach: how many connections, from whom, and for how long."""
