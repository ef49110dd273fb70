"""Settings of other systems as `rollq.toml`: what `rollq convert` and docs/migration know about XTuner and Trinity-RFT.

`xtuner.toml` and `trinity.toml` list every setting of a system, each with its equivalent.
"""
