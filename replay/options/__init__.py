"""The words of `unicron-replay`'s command line, and the examples of its help.

Use `arguments`; what the commands do lives in `views`, `simulation` and `evaluation`.
"""
