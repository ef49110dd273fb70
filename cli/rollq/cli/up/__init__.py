"""`rollq up`: all roles of a settings file on this machine, as child processes that are watched."""
