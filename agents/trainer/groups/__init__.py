"""Process groups of the data-parallel replicas: how the members of a generation meet, and their collectives."""
