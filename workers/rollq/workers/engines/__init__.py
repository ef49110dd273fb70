"""Engines turn token ids into token ids: the protocol, the host of an engine, and the engines that ship with rollq."""
