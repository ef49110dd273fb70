"""Rewards of samples: built-in judges, custom ones, and the processes that some of them run in."""
