"""Speed of rollq against plain Redis and stock RQ, measured in the same run: `python -m benchmarks`, `make bench`.

Each module measures one promise on an embedded server of its own, with the append-only file on (everysec), and
returns `Result`s. Sides that are compared take turns, so that a busy machine slows both; verdicts rest on the median
of the ratios, and their spread is shown.
"""
