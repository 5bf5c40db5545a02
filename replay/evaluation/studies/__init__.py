"""Studies: many runs side by side, their tables and plots, and `unicron-replay simulate`.

One run lives in `simulator`. Results stand in docs/results/evaluation.md.
"""
