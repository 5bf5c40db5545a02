"""Where a worker's threads stand, as it tells it itself, and which line of that a person wants to see."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.messages import Stacks
from unicrond.agents.trainer.process.flight import read_stacks
from unicrond.events.vocabulary.stacks import STACK_MAX_CHARS, cut_stack, place_in_program

OWN = """\
Thread MainThread (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355, in wait
  File "/opt/unicrond/agents/trainer/groups/group.py", line 183, in reduce
  File "/home/anna/train.py", line 62, in step
Thread loader (most recent call first):
  File "/home/anna/data.py", line 1, in load"""


def stand(depth: int, stands: threading.Event, end: threading.Event) -> None:
    if depth:
        stand(depth - 1, stands, end)
    else:
        stands.set()
        end.wait()


def deep(depth: int) -> str:
    return deep(depth - 1) if depth else read_stacks()


@pytest.mark.parametrize("depth", [0, 60])
def test_stacks_of_all_threads_are_read_with_the_main_thread_first(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stands, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=stand, args=(20, stands, end), name="loader")
    # Tests before this one may have left threads of libraries behind, more than are shown.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), thread])
    thread.start()
    try:
        assert stands.wait(10)
        text = deep(depth)
    finally:
        end.set()
        thread.join()
    assert len(text) <= STACK_MAX_CHARS
    main, _, loader = text.partition("Thread loader (most recent call first):\n")
    assert main.startswith("Thread MainThread (most recent call first):\n") and "in deep" in main
    assert loader.count("in stand") < 20 and "  ..." in loader.splitlines(), "other threads show their last calls"


def test_names_that_are_no_unicode_can_be_sent() -> None:
    program = "def hang(frame):\n    return frame()\nframe = hang(__import__('sys')._getframe)\n"
    space: dict[str, Any] = {}
    exec(compile(program, "/home/\udcff/train.py", "exec"), space)
    text = read_stacks({threading.main_thread().ident or 0: space["frame"]})
    assert "train.py" in text and frame(Stacks(text=text))


def test_long_stacks_are_cut_by_whole_lines() -> None:
    text = "\n".join(f'  File "{"x" * 90}.py", line {n}, in f' for n in range(99))
    cut = cut_stack(text)
    assert len(cut) <= STACK_MAX_CHARS and cut.endswith("in f\n...") and text.startswith(cut[:-4])
    assert cut_stack("short") == "short"


def test_place_is_the_innermost_line_of_the_program_itself() -> None:
    assert place_in_program(OWN) == "step (train.py:62)"
    own = OWN.replace("/home/anna/train.py", "/opt/unicrond/agents/trainer/loop/loop.py")
    assert place_in_program(own) == "reduce (group.py:183)", "of the loop's own frames the lock's is left out"
    assert place_in_program("\n".join(OWN.splitlines()[:2])) == "wait (threading.py:355)"
    assert place_in_program("") == "" and place_in_program("nothing of a stack") == ""


def test_place_is_found_in_what_py_spy_prints() -> None:
    text = (
        'Process 7: python3\nPython v3.12\n\nThread 7 (idle): "MainThread"\n    step (train.py:62)\n    main (run.py:3)'
    )
    assert place_in_program(text) == "step (train.py:62)"
