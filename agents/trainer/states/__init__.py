"""Training states: what they are, where they are kept, how they reach a worker."""
