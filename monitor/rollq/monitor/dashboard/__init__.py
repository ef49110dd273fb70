"""`rollq dashboard`: one page on a live run, the JSON that it reads, and the few changes that it offers."""
