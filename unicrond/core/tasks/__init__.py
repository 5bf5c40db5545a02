"""A task against what the plan gives it: reconciliation, reshaping, starvation, validation, where its states are.

Pure questions; the fold and `deciding` ask them.
"""
