"""Rewards to advantages, of whole samples and of single tokens. Pure."""
