"""The coordinator of unicrond: pure core (state, fold, decide, planning) and the daemon around it."""

VERSION = "0.1.0"
