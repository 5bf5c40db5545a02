"""Alarms in people's hands: acknowledged, silenced, assigned; and over."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from unicrond.events.vocabulary.base import Decision, Request
from unicrond.events.vocabulary.field_types import Micros, Name, Text
from unicrond.events.vocabulary.phrases import span

#: An alarm's name, and behind a colon its subject where there may be several: "outbox-backlog:node3".
ALARM_PATTERN = r"^[a-z][a-z-]{1,62}(:[A-Za-z0-9][A-Za-z0-9._-]{0,199})?\Z"
AlarmKey: TypeAlias = Annotated[str, Meta(pattern=ALARM_PATTERN)]


class AlarmAcknowledged(Request, frozen=True, kw_only=True):
    """Somebody has seen the alarm: it notifies nobody again until it is over and comes back."""

    is_noteworthy: ClassVar[bool] = True

    alarm: AlarmKey
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"alarm {self.alarm} acknowledged: {self.reason}"


class AlarmSilenced(Request, frozen=True, kw_only=True):
    """The alarm notifies nobody for so long after the request's place in the log."""

    is_noteworthy: ClassVar[bool] = True

    alarm: AlarmKey
    for_us: Micros
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"alarm {self.alarm} silenced for {span(self.for_us)}: {self.reason}"


class AlarmAssigned(Request, frozen=True, kw_only=True):
    """The alarm is this person's from now on."""

    is_noteworthy: ClassVar[bool] = True

    alarm: AlarmKey
    person: Name
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"alarm {self.alarm} assigned to {self.person}: {self.reason}"


class AlarmEnded(Decision, frozen=True, kw_only=True):
    """The alarm no longer stands, so that what people did about it is over as well."""

    alarm: AlarmKey

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"alarm {self.alarm} is over"
