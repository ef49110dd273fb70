"""Speed of rollq compared with plain Redis and stock RQ: `python -m benchmarks`, `make bench`.

Each module measures one promise on a separate embedded server with an append-only file (everysec), and returns
`Result`s. The sides of a comparison take turns, so that a busy machine slows both; the verdict uses the median of the
ratios, and the table shows their spread.
"""
