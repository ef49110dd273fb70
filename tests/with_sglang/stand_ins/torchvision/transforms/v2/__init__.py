from torchvision import __getattr__ as __getattr__  # type: ignore[import-not-found]
