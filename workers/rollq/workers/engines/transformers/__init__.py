"""An engine that generates in this process with a transformers model."""
