"""The session gateway: a model's API over HTTP. It records calls, which become the segments of samples."""
