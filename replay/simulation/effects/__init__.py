"""What each fault does to a world.

Use `fault_effects` (the table); what people cause is in `people_effects`.
"""
