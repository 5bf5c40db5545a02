"""The agent's process: command line, daemon and its keepers, sockets, outbox, and the ports behind which the core runs.

Use `cli` (unicron-agent), `daemon.Agent`, `options`, `shell` (the ports, which the simulation has too), `outbox`,
`run_dir`, `probe`. What an input means is decided in `agents/core`.
"""
