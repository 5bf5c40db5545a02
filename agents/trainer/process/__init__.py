"""A training process: what it is given, its line to the agent, what its exceptions mean."""
