"""Policies compared on failure traces, in virtual time."""
