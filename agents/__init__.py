"""The agents of unicrond: what runs on every node, and what enters the training processes."""

PROJECT = "unicrond"
