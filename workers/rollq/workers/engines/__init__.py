"""Engines continue token ids: their protocol, their host, and the engines that ship with rollq."""
