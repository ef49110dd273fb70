"""The bytes that samples, prompts and arrays become in Redis, and the checks of what is put there."""
