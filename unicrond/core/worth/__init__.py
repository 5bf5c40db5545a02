"""What work is worth, and what failures cost: WAF, the ledger's costs, gradient memory.

The planner maximises these figures (`planning`); goodput for people lives in `unicrond/views`.
"""
