"""The trainer's side of weights: writing files, publishing them, and broadcasting to workers over NCCL or gloo."""
