"""Jobs to groups: an asyncio RQ worker with an engine, agent loops, judges and weight following.

The way of a group: `rq_worker` pops tickets, `intake` leases groups for them, `generation` runs a loop and a judge for
each sample and puts the result. `renewal` keeps the leases, `following` the weights, `ledger` RQ's books; `run` ties
all together.
"""
