"""Text for terminals: tables, units, and what models wrote."""
