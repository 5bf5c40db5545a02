"""Megatron-LM, unmodified, as a task: `entry: megatron-lm`. What is replaced in it: `seams.py`; what replaces it:
`adapter.py`."""
