"""Training states: their format, where they are stored, and how a worker loads one."""
