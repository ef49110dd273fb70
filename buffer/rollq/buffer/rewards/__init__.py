"""Converts rewards to advantages, for whole samples and for single tokens. Pure."""
