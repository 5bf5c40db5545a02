"""The choice of the kernel: plain numpy at once, the compiled one as soon as it is warm.

Both give the same bits (a test checks that), so it never matters for a plan which one ran. numba is
imported by `warm` alone: the coordinator serves within a second of its start and warms the kernel in a
thread meanwhile. Compiled code is stored in numba's cache, so that only the first start on a machine compiles.
"""

from __future__ import annotations

from types import ModuleType

from unicrond.core.planning import kernel_numpy

_active: ModuleType = kernel_numpy


def active() -> ModuleType:
    """Return the module whose functions compute now."""
    return _active


def warm() -> None:
    """Load (or compile) the compiled kernel and use it from now on. Blocks for up to some ten seconds."""
    use("numba")


def use(name: str) -> None:
    """Choose the kernel: "numpy" or "numba"."""
    global _active
    if name == "numba":
        from unicrond.core.planning import kernel_numba

        _active = kernel_numba
    else:
        _active = kernel_numpy
