"""Tickets to scored groups: an asyncio RQ worker with an engine, agent loops, judges, and live weights.

Read in this order: `run` wires a worker together; `groups` leases groups, runs them and puts the results; `agents`
generates each sample, `judging` scores it, `weight_follower` keeps the engine's weights current; `engines` does the
inference, over `http` where the engine is a server. `rq` is all that RQ sees of a worker.
"""
