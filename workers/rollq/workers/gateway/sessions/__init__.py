"""A session: its calls as a tree, how each is answered, and the sample that they become."""
