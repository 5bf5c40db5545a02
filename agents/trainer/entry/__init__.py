"""Where a worker begins: `preload` (imported once in the fork server) and `worker.run` (called in each child).

Nothing imports this room; the fork server finds both by name.
"""
