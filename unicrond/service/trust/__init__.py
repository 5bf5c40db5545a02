"""The head's keys and certificates while it runs: node logins, renewal, signed memberships.

The forms live in `events/trust`.
"""
