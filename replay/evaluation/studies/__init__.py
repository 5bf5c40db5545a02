"""Studies: many runs side by side, their tables and plots, and `unicron-replay simulate`.

One run lives in `simulator`. Results stand in docs/results/evaluation.md; those of `calibration`, which holds the
throughput model to published runs, in docs/results/calibration.md.
"""
