"""Environment variables that a task may not set: they belong to the agent, or run other code in every child process.

`UNICRON_` is the worker's own: a task may set its settings (docs/operate/configuration.md) and nothing else.
"""

from __future__ import annotations

#: The settings of a worker that a task file may give.
SETTINGS = frozenset(
    {
        "UNICRON_AUDIT_BUDGET",
        "UNICRON_BUCKET_BYTES",
        "UNICRON_CHECKSUM_EVERY",
        "UNICRON_COLLECTIVE_TIMEOUT_S",
        "UNICRON_DETERMINISTIC",
        "UNICRON_FAULT",
        "UNICRON_FAULT_WAIT_S",
        "UNICRON_HANG_FLOOR_S",
        "UNICRON_LANES",
        "UNICRON_LEASE_S",
        "UNICRON_SAVE_WAIT_S",
        "UNICRON_STANDBY_MAX",
        "UNICRON_START_S",
    }
)
_LOADS_CODE = "would load other code into every process of the task; set it in the program that needs it"
_OF_THE_AGENT = "is the agent's to set; remove it"
#: Name, or the beginning of names, and what is wrong with it.
_RESERVED = {
    "LD_": _LOADS_CODE,
    "DYLD_": _LOADS_CODE,
    "GCONV_PATH": _LOADS_CODE,
    "GLIBC_TUNABLES": _LOADS_CODE,
    "BASH_ENV": _LOADS_CODE,
    "PYTHONHOME": _LOADS_CODE,
    "PYTHONSTARTUP": _LOADS_CODE,
    "UNICRON_": "is not a setting of workers; docs/operate/configuration.md lists those",
    "CUDA_VISIBLE_DEVICES": _OF_THE_AGENT,
    "NVIDIA_VISIBLE_DEVICES": _OF_THE_AGENT,
    "XDG_RUNTIME_DIR": _OF_THE_AGENT,
    "CREDENTIALS_DIRECTORY": _OF_THE_AGENT,
    "NOTIFY_SOCKET": _OF_THE_AGENT,
    "WATCHDOG_PID": _OF_THE_AGENT,
    "WATCHDOG_USEC": _OF_THE_AGENT,
    "LISTEN_FDS": _OF_THE_AGENT,
    "LISTEN_PID": _OF_THE_AGENT,
}


def refusal(name: str) -> str:
    """Say why a task may not set the variable; "" where it may."""
    if name in SETTINGS:
        return ""
    for prefix, reason in _RESERVED.items():
        if name == prefix or (prefix.endswith("_") and name.startswith(prefix)):
            return reason
    return ""
