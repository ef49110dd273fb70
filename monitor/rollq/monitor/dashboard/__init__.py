"""`rollq dashboard`: one page about a live run, the JSON that it reads, and the few changes that it offers."""
