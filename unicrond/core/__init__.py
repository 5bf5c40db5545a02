"""The pure core: what the log means (state, fold) and what follows from it (decide, planning).

No clock, no input, no output: time is data.
"""
