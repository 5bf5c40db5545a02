"""What an agent needs of its machine: cgroups, prctl, users, paths of the run directory, counts of OOM kills.

Modules are independent of each other; none knows the agent's state. What the head needs too lives in `events/host`.
"""
