"""What must hold: `invariants` (one small function per rule) and `checker`, which sees everything that happens.

A breach ends the run with its story and the command that repeats it.
"""
