"""The commands as they are installed: entry points, `unicrond`'s own command line, and its keys, TLS, configuration.

Use `entry_points` and `cli`; `unicronctl` lives in `ctl`, `unicron-agent` in `agents/shell`, `unicron-replay` in
`replay`.
"""
