"""Process groups: how the members of a generation meet, and what they do together."""
