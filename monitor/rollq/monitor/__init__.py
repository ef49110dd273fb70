"""What a run looks like from outside: records of its steps, snapshots of its buffer, a live view and a report."""
