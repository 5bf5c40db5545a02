"""A training process: its settings, its connection to the agent, the classification of its exceptions."""
