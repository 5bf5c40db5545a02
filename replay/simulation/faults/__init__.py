"""What goes wrong, as data drawn from a seed.

Use `faults` (the kinds), `boundary_events` (valid events at the edges of their types). What faults do: `../effects`.
"""
