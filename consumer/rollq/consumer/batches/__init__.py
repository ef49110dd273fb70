"""A step's batch: its groups, their token sequences, and the micro-batches of each rank."""
