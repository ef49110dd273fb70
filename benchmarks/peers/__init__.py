"""Groups through rollq and through other stores of experience, in turns: `python -m benchmarks.peers`.

Each store has a virtual environment with a process that runs `through_<store>.py` there, and servers beside it.
"""
