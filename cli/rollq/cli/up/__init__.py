"""`rollq up`: runs all roles of a settings file on this machine, as supervised child processes."""
