"""Rewards for samples: built-in judges, custom judges, and processes for judges."""
