"""Prompts to jobs: which prompt comes next, how many may be generated now, and the loop that schedules them."""
