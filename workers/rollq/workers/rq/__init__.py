"""The only code that uses RQ: the RQ worker, its tickets, and its job records."""
