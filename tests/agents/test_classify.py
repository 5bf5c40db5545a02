"""What an exit status says."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import get_args

import pytest

from unicrond.agents.core.exit_causes import Exit, classify
from unicrond.agents.host.host_resources import load_milli, memory_free_bytes
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.protocol.messages import EXIT_NO_AGENT, OomKill
from unicrond.agents.trainer.process.faults import SYMPTOMS
from unicrond.events.vocabulary import ExitCause


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, Exit(0, None, "exited")),
        (3 << 8, Exit(3, None, "exited")),
        (9, Exit(None, 9, "signalled")),
        (11 | 0x80, Exit(None, 11, "core_dumped")),
    ],
)
def test_exit_decodes_wait_status(status: int, expected: Exit) -> None:
    assert Exit.of(status) == expected


def test_exit_code_137_of_shell_depends_on_oom_evidence() -> None:
    assert Exit.of(137 << 8, "yes") == Exit(137, None, "oom_killed")
    assert Exit.of(137 << 8, "maybe") == Exit(137, None, "exited")


@pytest.mark.parametrize(("oom", "cause"), [("yes", "oom_killed"), ("no", "signalled"), ("maybe", "maybe_oom_killed")])
def test_exit_cause_follows_oom_evidence(oom: OomKill, cause: str) -> None:
    assert Exit.of(9, oom).cause == cause


@pytest.mark.parametrize(
    ("end", "ready", "kind", "words"),
    [
        (Exit(None, signal.SIGKILL, "signalled"), True, "process_exit", "killed by SIGKILL from outside unicron; not"),
        (Exit(None, signal.SIGKILL, "oom_killed"), True, "out_of_memory", "smaller micro_batch"),
        (Exit(None, signal.SIGKILL, "maybe_oom_killed"), True, "process_exit", "or by the OOM killer: see dmesg"),
        (Exit(None, signal.SIGKILL, "oom_killed"), False, "start_failed", "OOM killer"),
        (
            Exit(None, signal.SIGKILL, "unknown"),
            True,
            "process_exit",
            "or its container; what ended",
        ),
        (
            Exit(137, None, "oom_killed"),
            True,
            "out_of_memory",
            "137: a process of it was killed by the",
        ),
        (Exit(None, signal.SIGSEGV), True, "process_exit", "killed by SIGSEGV;"),
        (Exit(None, signal.SIGSEGV, "core_dumped"), True, "process_exit", "killed by SIGSEGV with a core dump;"),
        (Exit(None, signal.SIGRTMIN + 3), True, "process_exit", "killed by signal"),
        (Exit(1, None), True, "exception", "traceback"),
        (Exit(EXIT_NO_AGENT, None), True, "process_exit", "no agent"),
        (Exit(75, None), True, "process_exit", "membership"),
        (Exit(42, None), True, "process_exit", "exit code 42"),
        (Exit(1, None), False, "start_failed", "not ready yet"),
    ],
)
def test_exit_has_kind_and_plain_sentence(end: Exit, ready: bool, kind: str, words: str) -> None:
    found, text = classify(end, ready=ready)
    assert found == kind
    assert words in text


def test_visible_gpus_are_counted_without_cuda(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({}, tmp_path / "none") == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-5"}, tmp_path) == ("3", "GPU-5")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_host_reports_load_and_free_memory(tmp_path: Path) -> None:
    assert load_milli() >= 0
    assert memory_free_bytes() > 0
    assert memory_free_bytes(tmp_path / "none") == 0


def test_document_lists_every_exit_cause_and_symptom() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate" / "faults.md").read_text()
    for cause in get_args(ExitCause):
        assert cause == "unknown" or f"| {cause} |" in text
    table = text[text.index("| row | kind |") :].split("\n\n")[0]
    assert {symptom.kind for symptom in SYMPTOMS} == set(re.findall(r"`(\w+)` \|$", table, re.MULTILINE))
