"""Replay: fold a log again to any point, read-only. No policy lives here; the folds are the coordinator's."""

PROJECT = "unicrond"
