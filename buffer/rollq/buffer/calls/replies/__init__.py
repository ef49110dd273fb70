"""The values that calls return, frozen: a module for each kind of question."""
