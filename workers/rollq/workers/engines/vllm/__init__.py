"""An engine that runs vLLM's AsyncLLM in this process."""
