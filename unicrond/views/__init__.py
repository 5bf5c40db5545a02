"""What is shown and decides nothing: goodput, lemons, notifications, spans, plan previews, spares.

Each view reads entries and states; none is imported by `unicrond/core`.
"""
