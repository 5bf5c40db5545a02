"""Optimizer state that is divided among the replicas."""
