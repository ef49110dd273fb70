"""Sessions: the tree of calls, their answers, and the sample that the calls make."""
