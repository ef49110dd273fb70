"""A step's batch from the buffer: the trainer's lease, claims, waits, reads and replays."""
