"""Tools of MCP servers: their settings, their schemas, connections and sessions."""
