"""The meaning of NVIDIA's XID codes: one table (docs/operate/faults.md, "Accelerators", is compared with it).

Rules
-----
* Meanings and advice are the vendor's (XID catalogue); the error kind is ours, and its severity the coordinator's.
* No kind: it is reported, and nothing follows, unless it foretells a failure. Another code, or the process's own exit,
  reports a symptom's cause.
* A code that is not in the table is a fault of the program that ran there (SEV2), with a warning that names it: the
  code may be informational, so no node is isolated over a single one; a broken GPU reports it again, and then the node
  is.
* The advice decides what may readmit the node (isolation.py): a health check; where it is a reboot, or
  another part, a person or the operator's repair command first.
* Where the driver itself says what the GPU needs (its recovery action), that counts instead (`diagnosis.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from unicrond.events.vocabulary import ErrorKind, RepairNeed


@dataclass(frozen=True, slots=True)
class Xid:
    """A row of the table. `recurring`: the first such event is the program's fault, a second under another worker is
    the GPU's. `foretells`: nothing has failed yet."""

    codes: tuple[int, ...]
    meaning: str
    advice: str
    kind: ErrorKind | None
    recurring: bool = False
    predicts_failure: bool = False

    @property
    def needs(self) -> RepairNeed:
        """Return the repair that the advice demands before the GPU is used again."""
        return _NEEDS.get(self.advice, "")


_NEEDS: dict[str, RepairNeed] = {"reset the GPU": "reset", "reboot the node": "reboot"}
#: The driver has changed its recovery action for the GPU; the code itself says nothing more.
RECOVERY_ACTION_CHANGED = 154

XIDS: tuple[Xid, ...] = (
    Xid((13,), "engine exception", "restart the program", "illegal_memory_access", recurring=True),
    Xid((31,), "memory management fault", "restart the program", "illegal_memory_access", recurring=True),
    Xid((8,), "GPU stopped", "restart the program", "cuda_error"),
    Xid((11, 32), "corrupt push buffer", "restart the program", "cuda_error"),
    Xid((39, 40, 41), "copy engine exception", "restart the program", "cuda_error"),
    Xid((69,), "engine class error", "restart the program", "cuda_error"),
    Xid((43,), "GPU stopped processing for a program", "none: the program ends by itself", None),
    Xid((45,), "pre-emptive clean-up", "none: a symptom of another XID", None),
    Xid((48, 171, 172), "uncorrectable double-bit ECC error", "diagnose", "ecc_error"),
    Xid((63,), "row remapping recorded", "none", None),
    Xid((64,), "row remapping failed", "reset the GPU", "ecc_error"),
    Xid((92,), "high rate of single-bit ECC errors", "none", None, predicts_failure=True),
    Xid((94,), "contained ECC error", "restart the program", "gpu_fault"),
    Xid((95,), "uncontained ECC error", "reboot the node", "ecc_error"),
    Xid((74, 144, 145, 146, 147, 148, 149, 150), "NVLink error", "diagnose the link", "nvlink_error"),
    Xid((79,), "GPU has fallen off the bus", "reboot the node", "gpu_broken"),
    Xid((46,), "GPU stopped: timeout", "reset the GPU", "gpu_broken"),
    Xid((62,), "micro-controller halt", "reset the GPU", "gpu_broken"),
    Xid((109,), "context switch timeout", "reset the GPU", "gpu_broken"),
    Xid((110,), "security fault", "reset the GPU", "gpu_broken"),
    Xid((119, 120), "GSP timeout or error", "reset the GPU", "driver_error"),
    Xid((136,), "link training failed", "reset the GPU", "nvlink_error"),
    Xid((137,), "NVLink privilege error", "none", None),
    Xid((140,), "unrecovered ECC error", "reset the GPU", "ecc_error"),
    Xid((143,), "GPU initialisation failed", "reset the GPU", "gpu_broken"),
    Xid((RECOVERY_ACTION_CHANGED,), "recovery action changed", "what the driver says", "gpu_broken"),
    Xid((155,), "NVLink software error", "reset the GPU", "nvlink_error"),
    Xid((156,), "resource retired", "reset the GPU", "gpu_broken"),
    Xid((158,), "fatal timeout", "reset the GPU", "gpu_broken"),
)

_BY_CODE = {code: row for row in XIDS for code in row.codes}


def xid(code: int) -> Xid:
    """Return the row of a code; for one that is not in the table the conservative default."""
    row = _BY_CODE.get(code)
    return row or Xid((code,), "unknown XID", "look it up in the vendor's catalogue", "gpu_fault", True)


def is_known(code: int) -> bool:
    """Return whether the table has the code."""
    return code in _BY_CODE
