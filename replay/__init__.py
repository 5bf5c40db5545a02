"""Replay: fold a log again to any point, read-only. No policy lives here; the folds are the coordinator's.

`cli` is unicron-replay; `reading` opens a log, `views` tells what is in it, `simulation` fuzzes the real cores under
virtual time, `evaluation` compares policies on failure traces; `options` are the words of the command line.
"""
