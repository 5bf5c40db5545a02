"""The simulated cluster: heads, agents, fork servers, the log's server and clients, on the real cores.

Use `world`, which puts it together. The training processes live in `trainer`, links and a node's memory in `models`,
the rules in `checks`. What a part needs of the one above it stands beside it, as a Protocol.
"""
