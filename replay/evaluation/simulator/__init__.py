"""One run of a policy through a failure trace; Unicron's policy is the coordinator's real core (`core_driver`).

The world lives in `model`, rival policies in `policies`, comparisons in `studies`.
"""
