"""Alarms by name, and what people do about them.

Rules
-----
* An alarm is one line that a person has to look at. Its key is its name, and where there may be several of one name its
  subject behind a colon: `outbox-backlog:node3`. Names are stable, and stand in NAMES with their meaning; the text
  changes while it stands.
* The state does not hold alarms: they follow from it, or from what a head sees. It holds what people do about them,
  by key, at most ALARMS_MAX, until AlarmEnded says that the alarm no longer stands.

| it is | comes by | ends by |
|---|---|---|
| acknowledged | AlarmAcknowledged | AlarmEnded |
| silenced | AlarmSilenced; a later one counts | its time, AlarmEnded |
| assigned | AlarmAssigned; a later one counts | AlarmEnded |

* An alarm that is acknowledged or silenced is quiet: it notifies nobody, and is shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

ALARMS_MAX = 256

#: Name -> what it means, and of what it stands.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "api-crowded": "connections of the API were closed, since there were too many",
        "appends-slow": "appends to the log take long",
        "archive-behind": "the archive lacks entries of the log",
        "auth-off": "the configuration lets every process of the head's machine do everything",
        "certificate-ends": "the head's certificate ends soon, or has ended",
        "certificate-unused": "new certificates cannot be used",
        "checkpoint-unsaved": "a task's last checkpoint was not written",
        "clocks-apart": "the log's clock and the head's are minutes apart",
        "decisions-held": "the brakes hold a decision back",
        "domain-lost": "nodes that were lost together are awaited",
        "job-failed": "a job beside the head fails, and is begun again",
        "log-large": "the log in NATS is larger than log.alarm_gib",
        "log-truncated": "nodes have read entries that the log does not hold",
        "log-untrimmed": "old entries are not removed from NATS",
        "logins-stale": "NATS does not know the newest logins",
        "logins-shared": "NATS accepts a login that may do everything",
        "message-unreadable": "a part of the cluster wrote what this head cannot read",
        "node-floods": "a node writes far more to the log than an agent does",
        "node-isolated": "a node gets no workers",
        "node-lost": "a node is silent",
        "node-repair": "a node's hardware waits for a person",
        "nodes-unheard": "the head hears none of its nodes",
        "notification-failed": "a destination of notifications cannot be reached",
        "observations-refused": "a node has said what it has no right to say, within the last hour",
        "outbox-backlog": "a node cannot append its observations",
        "task-failed": "a task has failed, within the last hour",
        "task-waiting": "a task has no workers, or fewer than it needs",
        "tokens-unreadable": "api.tokens_file cannot be read",
        "view-closed": "a view of the log ended by a bug",
        "volume-full": "a volume of the log is nearly full",
        "worker-floods": "a worker says far more than goes on to the log",
    }
)


class Alarm(str):
    """The line of an alarm, with its name and its subject ("": there is one of this name)."""

    __slots__ = ("name", "subject")

    name: str
    subject: str

    def __new__(cls, name: str, text: str, subject: str = "") -> Alarm:
        """Make the alarm; a name that is not in NAMES is a bug."""
        if name not in NAMES:
            raise ValueError(f"alarm {name}: is not in NAMES")
        alarm = super().__new__(cls, text)
        alarm.name, alarm.subject = name, subject
        return alarm

    @property
    def key(self) -> str:
        """Return what people call it by: name, or name:subject."""
        return f"{self.name}:{self.subject}" if self.subject else self.name


class AlarmHandling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what people did about an alarm, and the reason that came last. Times are by the log; 0 and "": nobody did.

    A name is "-" where the API wants no token.
    """

    acknowledged_by: str = ""
    acknowledged_us: int = 0
    silenced_by: str = ""
    silenced_until_us: int = 0
    person: str = ""
    assigned_by: str = ""
    reason: str = ""

    def is_quiet(self, now_us: int) -> bool:
        """Return whether the alarm notifies nobody now."""
        return bool(self.acknowledged_us) or now_us < self.silenced_until_us
