"""What people do about alarms: state/alarms.py has the rules."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from unicrond.core.state.alarms import ALARMS_MAX, AlarmHandling
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

_NOBODY = "-"


def alarm_acknowledged(state: ClusterState, event: v.AlarmAcknowledged, _: Envelope) -> ClusterState:
    """Record who has seen the alarm, and when."""
    return _with(state, event, acknowledged_by=event.requester or _NOBODY, acknowledged_us=state.now_us)


def alarm_silenced(state: ClusterState, event: v.AlarmSilenced, _: Envelope) -> ClusterState:
    """Record until when the alarm is to notify nobody."""
    return _with(state, event, silenced_by=event.requester or _NOBODY, silenced_until_us=event.until_us)


def alarm_assigned(state: ClusterState, event: v.AlarmAssigned, _: Envelope) -> ClusterState:
    """Record whose the alarm is."""
    return _with(state, event, assigned_by=event.requester or _NOBODY, person=event.person)


def alarm_ended(state: ClusterState, event: v.AlarmEnded, _: Envelope) -> ClusterState:
    """Forget what people did about the alarm."""
    if event.alarm not in state.alarms:
        return state
    return replace(state, alarms={key: rest for key, rest in state.alarms.items() if key != event.alarm})


def _with(
    state: ClusterState, event: v.AlarmAcknowledged | v.AlarmSilenced | v.AlarmAssigned, **fields: Any
) -> ClusterState:
    handling = replace(state.alarms.get(event.alarm, AlarmHandling()), reason=event.reason, **fields)
    alarms = {key: rest for key, rest in state.alarms.items() if key != event.alarm} | {event.alarm: handling}
    return replace(state, alarms=dict(list(alarms.items())[-ALARMS_MAX:]))
