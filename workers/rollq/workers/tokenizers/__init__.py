"""Convert text to token ids and back: Hugging Face tokenizers, and the byte tokenizer of the simulated engine."""
