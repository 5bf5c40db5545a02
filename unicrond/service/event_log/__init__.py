"""The event log's care: archive and trim, backup and restore, consumers, figures, and whether it is the right log.

The log itself lives in `events`.
"""
