"""What the agent's core does about each input, by subject; `agents/core.py` is the door and holds the rules."""
