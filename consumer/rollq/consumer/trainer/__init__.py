"""The reference trainer: model and optimizer, checkpoints, ranks, and a run from its archive."""
