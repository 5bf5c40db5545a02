"""Gradients: summed over micro-batches, then over replicas."""
