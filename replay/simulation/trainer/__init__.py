"""Simulated training processes: the real lifecycle, driven under virtual time over modelled groups and states.

The real driver is `agents/trainer/loop/driver.py`.
"""
