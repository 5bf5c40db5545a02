"""What the simulation models itself: links, a node's memory, weights, and the loop whose time jumps.

Nothing here holds a rule of unicrond.
"""
