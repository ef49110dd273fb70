"""MCP servers' tools: settings, schemas, connections and sessions."""
