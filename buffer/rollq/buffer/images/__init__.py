"""Images: their files, and a model's processor for them."""
