"""The encoding of samples, prompts and arrays in Redis, and the checks before they are put there."""
