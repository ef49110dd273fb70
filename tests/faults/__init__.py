"""The fault suite: proof that rollq keeps its promises while processes, connections and servers fail.

    history    what every role does, as calls and their outcomes, in append-only files
    checker    reads the histories and a dump of the store, and finds broken promises; shares no code with rollq
    dump       the store as raw Redis commands show it
    processes  the roles as processes: rollq's producer and worker, and a small trainer of two ranks
    inserting  an expert's groups, and the role that inserts them
    operator   orders for groups, other sizes of batches, and a deletion with a way back
    chaos      runs the roles, breaks them and the server as `plan` says, and has the checker judge what is left
    crash_points, scenarios   kill each role before and after each of its Redis calls
    fuzz_decoders, fuzz_functions   feed hostile inputs to all that reads bytes, and to every Redis function

`make chaos`, `make crashpoints` and `make fuzz` run the long versions; the tests in this folder run short ones. Plans,
fates of commands and inputs are pure functions of a seed, which each run prints.
"""
