"""Settings of other systems as `rollq.toml`: XTuner and Trinity-RFT, for `rollq convert` and docs/migration.

`xtuner.toml` and `trinity.toml` list every setting of a system, each with its equivalent.
"""
