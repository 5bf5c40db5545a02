"""What goes wrong, as data drawn from a seed, and what each fault does to the world.

Use `faults` (the kinds), `fault_effects` (the table), `boundary_events` (valid events at the edges of their types).
"""
