"""Everything that knows RQ: the worker that RQ sees, the tickets it pops, the job records it keeps."""
