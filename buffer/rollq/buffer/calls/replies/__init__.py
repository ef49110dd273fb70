"""The frozen values that calls return: one module per kind of question."""
