"""The simulated cluster: heads, agents, fork servers, the log's server and clients, on the real cores.

The training processes live in `trainer`, links and disks in `models`, the rules in `checks`.
"""
