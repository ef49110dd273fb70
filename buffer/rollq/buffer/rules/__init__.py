"""The rules of a task, and what follows from them. They know no server."""
