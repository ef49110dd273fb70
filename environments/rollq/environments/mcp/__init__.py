"""Tasks whose model calls the tools of an MCP server: `env = "mcp:URL"`, or `"mcp:COMMAND"`."""
