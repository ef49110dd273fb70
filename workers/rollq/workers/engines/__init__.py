"""Engines turn token ids into token ids: the protocol, what hosts an engine, and the ones that ship with rollq."""
