"""The agent's process: command line, daemon, sockets, outbox, and the ports behind which the core runs.

Use `cli` (unicron-agent), `daemon.Agent`, `shell` (the ports, which the simulation has too), `outbox`, `run_dir`,
`probe`. What an input means is decided in `agents/core`.
"""
