"""The tracer of the tour: which functions of the project each process of a cluster runs, and who is handed which event.

`trace.py` copies this file as `sitecustomize.py` into a folder on PYTHONPATH, beside `trace.json`, which names the
project's root. Each process appends lines to a file of its own there. So it imports nothing of the project, and the
standard library alone.

* `calls`: the functions that ran in a hundredth of a second.
* `sighting`: a function was called with an event, a message or an effect, returned it or yielded it; with its callers
  where the process sees that object for the first time. Those are the ones who made it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_FOLDER = Path(__file__).resolve().parent
_BUCKET_NS = 10_000_000
_FLUSH_NS = 100_000_000
#: Code of a function, not of a module or the body of a class.
_OPTIMIZED = 0x1
#: What is followed: events of the log, messages between agent, fork server and worker, effects of the lifecycle.
_BASES = ("Event", "WireMessage", "Effect")
_PACKAGES = ("unicrond.", "events.", "agents.")
_TEXT_MAX = 120


class ProcessTracer:
    """What one process does. `root`: the project's, ending with a slash."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._names: dict[CodeType, str] = {}
        self._kinds: dict[type, str] = {}
        self.begin_process()

    def begin_process(self) -> None:
        """Begin with empty hands, in a file of this process: after a fork the parent keeps the rest."""
        self._lock = threading.RLock()
        self._lines: list[str] = [json.dumps({"argv": sys.orig_argv, "pid": os.getpid(), "parent": os.getppid()})]
        self._objects: dict[int, Any] = {}
        self._bucket = 0
        self._functions: set[str] = set()
        self._flush_ns = 0
        self._path = _FOLDER / f"{os.getpid()}.jsonl"

    def profile(self, frame: FrameType, kind: str, value: Any) -> None:
        """Take one event of the interpreter (`sys.setprofile`)."""
        if kind not in ("call", "return"):
            return
        name = self._names.get(frame.f_code)
        if name is None:
            name = self._names[frame.f_code] = self._name(frame.f_code)
        if not name:
            return
        with self._lock:
            now_ns = time.time_ns()
            if kind == "call":
                self._count(name, now_ns)
                count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
                for argument in frame.f_code.co_varnames[:count]:
                    self._see(frame.f_locals.get(argument), frame, kind, now_ns)
            else:
                self._see(value, frame, kind, now_ns)
            if now_ns - self._flush_ns > _FLUSH_NS:
                self._flush_ns = now_ns
                self.flush()

    def flush(self) -> None:
        """Write the lines out: a process may be killed at any time."""
        lines, self._lines = self._lines, []
        if lines:
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")

    def _name(self, code: CodeType) -> str:
        """Return `file:function` of code of the project, the file relative to its root; "" of all else."""
        if not code.co_flags & _OPTIMIZED or code.co_filename.startswith("<"):
            return ""
        path = os.path.realpath(code.co_filename)
        relative = path.removeprefix(self._root)
        is_ours = path != relative and not relative.startswith((".", "tests/"))
        return f"{relative}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}" if is_ours else ""

    def _count(self, name: str, now_ns: int) -> None:
        bucket = now_ns // _BUCKET_NS
        if bucket != self._bucket:
            if self._functions:
                at_us = self._bucket * _BUCKET_NS // 1000
                self._lines.append(json.dumps({"calls": sorted(self._functions), "at_us": at_us}))
            self._bucket, self._functions = bucket, set()
        self._functions.add(name)

    def _see(self, value: Any, frame: FrameType, kind: str, now_ns: int) -> None:
        seq = 0
        if {"envelope", "seq"} <= self._struct_fields(value):  # an entry of the log
            seq, value = value.seq, value.envelope
        if {"event", "producer"} <= self._struct_fields(value):  # an envelope
            value = value.event
        if not self._base(type(value)):
            return
        line = {
            "sighting": type(value).__name__,
            "base": self._kinds[type(value)],
            "at_us": now_ns // 1000,
            "kind": kind,
            "function": self._names[frame.f_code],
            "seq": seq,
            "object": id(value),
        }
        if id(value) not in self._objects:
            self._objects[id(value)] = value  # so that no other object gets its id
            line["fields"] = self._fields(value)
            line["callers"] = self._callers(frame)
        self._lines.append(json.dumps(line))

    @staticmethod
    def _struct_fields(value: Any) -> set[str]:
        fields = getattr(type(value), "__struct_fields__", ())
        return set(fields) if isinstance(fields, tuple) else set()

    def _base(self, kind: type) -> str:
        """Return which of _BASES a class derives from; "" if none."""
        base = self._kinds.get(kind)
        if base is None:
            ours = [base.__name__ for base in kind.__mro__ if base.__module__.startswith(_PACKAGES)]
            base = self._kinds[kind] = next((name for name in ours if name in _BASES), "")
        return base

    def _fields(self, value: Any) -> dict[str, Any]:
        names = getattr(value, "__struct_fields__", ())  # effects have none that tell them apart
        fields = {name: getattr(value, name) for name in names}
        return {
            name: item for name, item in fields.items() if isinstance(item, (str, int)) and len(str(item)) < _TEXT_MAX
        }

    def _callers(self, frame: FrameType) -> list[str]:
        """Return the project's functions on the stack, innermost first, without `frame` itself."""
        callers: list[str] = []
        caller = frame.f_back
        while caller is not None:
            name = self._names.get(caller.f_code)
            if name is None:
                name = self._names[caller.f_code] = self._name(caller.f_code)
            if name:
                callers.append(name)
            caller = caller.f_back
        return callers


def start() -> None:
    """Trace this process, its threads and the processes that it forks."""
    tracer = ProcessTracer(json.loads((_FOLDER / "trace.json").read_text())["root"].rstrip("/") + "/")
    os.register_at_fork(after_in_child=tracer.begin_process)
    threading.setprofile(tracer.profile)
    sys.setprofile(tracer.profile)


if (_FOLDER / "trace.json").exists():
    start()
