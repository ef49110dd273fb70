"""How one sample comes about: agent loops, conversations, environments and tools."""
