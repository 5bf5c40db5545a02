"""Workers' output and diagnostics for people: served on request, mirrored, pruned; stacks and flight recorders.

Use `query_service` (answers `events/queries`), `output_pruning`, `output_mirror`. Where output lies on disk is
`agents/host/paths.py`.
"""
