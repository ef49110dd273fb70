"""Parts of the documentation site that are generated, from the code or from other pages. `docs/hooks.py` adds them."""
