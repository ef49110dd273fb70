"""The fault suite: proof that rollq keeps its promises while processes, connections and servers fail.

    history    what every role does, as calls and their outcomes, in append-only files
    checker    reads the histories and a dump of the store, and finds broken promises; shares no code with rollq
    dump       the store as raw Redis commands show it
    plan       when which fault happens, as a pure function of a seed
    roles      the roles as processes: rollq's producer and worker, and a small trainer of two ranks
    chaos      runs the roles, carries out the plan, and has the checker judge what is left

`make chaos`, `make crashpoints` and `make fuzz` run the long versions; the tests in this folder run short ones.
"""
