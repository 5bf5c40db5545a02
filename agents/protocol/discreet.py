"""What a worker tells of a trouble, without the secrets of its task."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from agents.protocol.messages import Trouble
from events.masking import Mask, values_in
from events.vocabulary import TaskSpec

_MESSAGE_CHARS = 1024
_DETAIL_CHARS = 32768


def mask_of(spec: TaskSpec, environ: Mapping[str, str] = os.environ) -> Mask:
    """Hides the secrets of the task, as this worker's environment has them."""
    return Mask([*(environ[name] for name in spec.secrets if name in environ), *values_in(spec.env)])


def discreet(trouble: Trouble, mask: Mask) -> Trouble:
    """The same, without what the mask hides."""
    return replace(
        trouble,
        message=mask.text(trouble.message)[:_MESSAGE_CHARS],
        detail=mask.text(trouble.detail)[-_DETAIL_CHARS:],
    )
