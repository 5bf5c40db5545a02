"""The agents of unicrond: what runs on every node, and what enters the training processes.

`shell` (the daemon) drives `core` (pure) and its keepers: `fork_server` (parent of the workers), `memory`, `output`,
`health`, `accelerators`, `kubernetes`; `protocol` is what a node's processes say to each other; `host` is the
machine. `trainer` alone enters training processes; the agent imports nothing of it.
"""
