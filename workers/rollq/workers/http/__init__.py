"""HTTP requests to servers: the client, its settings and retries, and pools of model servers."""
