"""Single groups and tables of groups, for people and as JSON."""
