"""The trainer's side of weights: writing files, publishing them, and broadcasting them to workers."""
