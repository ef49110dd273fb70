"""Requests to servers over HTTP: the client, its settings and retries, and pools of model servers."""
