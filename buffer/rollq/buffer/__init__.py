"""The replay buffer: groups at rest in Redis, and every move that a group can make. The ground floor: knows no role.

         admit            lease              put
dataset ----> pending ----------> running -------------> completed --claim--> claimed --commit--> archived
               ^   ^               | | |                   ^  | ^               | |                |   |
               |   |  reap,        | | +--put-> filtered   |  | +----release----+ +-release(drop)  |   | checkpoint
               |   +--hand_back----+ +----put-> failed     |  | expire        begin_epoch(replay)  |   v
               |                     +----put-> aborted    |  v               claimed <------------+ (trained)
               |                                 |         | expired          completed <----------+
               +-------------recycle-------------+---------+--+                      begin_epoch(return)

A group is in exactly one status set. Edges are named by the function that makes the move; each is one atomic call.
"""
