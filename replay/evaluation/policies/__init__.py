"""The systems that Unicron is compared with, each with its own mechanism of recovery, one per module."""
