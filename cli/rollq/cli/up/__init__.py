"""`rollq up`: all roles of a settings file on this machine, as supervised child processes."""
