"""The protocols that the gateway speaks, one per module. They parse requests into calls and write answers. Pure."""
