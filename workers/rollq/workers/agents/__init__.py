"""How one sample is generated: agent loops, conversations, environments and tools."""
