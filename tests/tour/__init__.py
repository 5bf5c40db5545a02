"""The tour: `docs/one-failure.md`, written from a recorded run under a tracer. `make tour` records it anew."""
