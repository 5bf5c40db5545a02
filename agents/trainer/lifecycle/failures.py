"""What a driver throws into the lifecycle instead of a result, and what the lifecycle ends with."""

from __future__ import annotations


class GroupBroken(Exception):
    """A collective, or the forming of the group, failed: most likely a member is lost."""


class MembershipSuperseded(Exception):
    """A newer membership has come; this group is of no use any more."""


class RendezvousTimedOut(Exception):
    """No membership came in time."""


class ProgramLeftLoop(Exception):
    """At a seam: the program has called `stop` and has left its loop."""


class QuitRequested(BaseException):
    """The agent has asked the worker to end. No Exception: a training script must not catch it by accident."""


class StateLost(RuntimeError):
    """All holders of a part of the optimizer's state are lost, nothing was saved, and no process is as the seed made
    it: training has to begin anew, in new processes."""
