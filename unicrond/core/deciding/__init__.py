"""What `unicrond/core/decide.py` decides, by subject; the order of all decisions stands there.

The choice of a response to a failure has one place, `response`; the others carry it out (`memberships`,
`worker_placement`, `plans`, `nodes`) and close the incident.
"""
