"""Nodes: liveness, isolation, drains, removal, types of GPU; and when a standby head may lead.

Pure questions; the fold and `deciding` ask them. Which node is isolated, and why, is decided in `deciding/response.py`.
"""
