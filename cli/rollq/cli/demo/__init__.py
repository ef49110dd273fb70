"""`rollq demo` and `rollq init`: files of runs that train on any laptop."""
