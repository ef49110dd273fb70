"""The protocols that the gateway speaks, a module each: requests are parsed into calls, answers written out. Pure."""
