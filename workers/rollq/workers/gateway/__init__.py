"""The session gateway: a model's API over HTTP whose calls are recorded and become the segments of samples."""
