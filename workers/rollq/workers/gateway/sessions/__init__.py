"""A session: the tree of its calls, their answers, and the sample that they make."""
