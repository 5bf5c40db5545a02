"""The coordinator's loop: read the log, fold, decide, append; with plans, snapshots, timers and heartbeats beside it.

Use `coordinator.Coordinator`; `follower` is its reading half. What is decided lives in `unicrond/core`.
"""
