"""`rollq top`: the status of a run, live, and pause, resume and drain by keyboard."""
