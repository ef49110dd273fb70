"""Text for terminals: tables, units, and models' texts."""
