"""Single groups and tables of groups, as text and as JSON."""
