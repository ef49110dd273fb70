"""Settings of other systems as `rollq.toml`: the knowledge of `rollq convert` and docs/migration about XTuner and
Trinity-RFT.

`xtuner.toml` and `trinity.toml` list every setting of a system, each with its equivalent.
"""
