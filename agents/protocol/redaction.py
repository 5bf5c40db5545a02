"""Removes the secrets of a task from a worker's error reports."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.events.host.masking import Mask, values_in
from unicrond.events.vocabulary import ErrorReported, TaskSpec

_MESSAGE_CHARS = 1024
_DETAIL_CHARS = 32768


def mask_of(spec: TaskSpec, environ: Mapping[str, str] = os.environ) -> Mask:
    """Return a mask that hides the secrets of the task, as this worker's environment has them."""
    return Mask([*(environ[name] for name in spec.secrets if name in environ), *values_in(spec.env)])


def redact(report: ErrorReported, mask: Mask) -> ErrorReported:
    """Return the report without the text that the mask hides."""
    return replace(
        report,
        message=mask.text(report.message)[:_MESSAGE_CHARS],
        detail=mask.text(report.detail)[-_DETAIL_CHARS:],
    )
