"""The life of a group in a worker: leased for a ticket, run to its end, filtered, and put."""
