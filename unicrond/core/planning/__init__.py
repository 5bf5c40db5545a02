"""Plan generation: how many workers each task gets, and where.

`problem.py` states the question, `solver.py` answers it exactly (`solution.py`), `table.py` answers every possible
next question ahead of time, `placement.py` turns counts into workers on nodes. All of it is pure: no clock,
no I/O, no randomness; the caller measures and logs. Nothing here imports numba until `kernel_choice.warm()`.
"""
