"""An engine that asks OpenAI-compatible servers over HTTP."""
