"""A whole cluster on one machine: `unicrond dev` and `unicrond demo`."""
