"""Which ranks hold the others up, by dumps of flight recorders: hand-made ones, and recorded hangs with injected ranks.

data/nccl_flight_recorder.json.xz: two hangs of 16 ranks, from the tests of NVIDIA/nvidia-resiliency-ext (Apache-2.0),
with each dump's fields that are read here. `UNICRON_FLIGHT_DUMPS` names another file of the same form:
{case: {"injected": [rank], "dumps": {rank: dump}}}.
"""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from unicrond.core.faults.flight_recorders import Attribution, attribute, attribution_text
from unicrond.events.queries.flight_dumps import DUMP_MAX_BYTES, BadDump, parse, standings

RECORDED = Path(
    os.environ.get("UNICRON_FLIGHT_DUMPS", Path(__file__).with_name("data") / "nccl_flight_recorder.json.xz")
)


def dump(groups: dict[str, tuple[list[int], int, int]], *transfers: tuple[str, str]) -> dict[str, Any]:
    """A dump as torch 2.9 writes it. `groups`: name -> ranks, numbers entered and finished; `transfers`: (group, "send
    0->1") that are pending."""
    entries = [
        {
            "pg_id": place, "process_group": [name, "G"], "collective_seq_id": number, "is_p2p": False,
            "profiling_name": "nccl:all_reduce", "state": "scheduled", "retired": False,
        }
        for place, (name, (_, entered, finished)) in enumerate(groups.items())
        for number in range(finished + 1, entered + 1)
    ]  # fmt: skip
    entries += [
        {"pg_id": list(groups).index(name), "process_group": [name, "G"], "p2p_seq_id": 1, "is_p2p": True,
         "profiling_name": f"nccl:{what}", "state": "scheduled"}
        for name, what in transfers
    ]  # fmt: skip
    return {
        "version": "2.9",
        "pg_config": {name: {"name": name, "desc": "G", "ranks": str(ranks)} for name, (ranks, *_) in groups.items()},
        "pg_status": {
            str(place): {"last_enqueued_collective": entered, "last_completed_collective": finished}
            for place, (_, entered, finished) in enumerate(groups.values())
        },
        "entries": entries,
    }


def judged(**dumps: dict[str, Any]) -> Attribution:
    return attribute({int(rank[1:]): standings(parse(json.dumps(told))) for rank, told in dumps.items()})


TP, DP = [0, 1], [0, 2]


def test_rank_that_has_not_entered_is_named_and_its_victims_victims_are_not() -> None:
    """1 hangs; 0 waits for it, and so has not entered what 2 waits in."""
    result = judged(r0=dump({"1": (TP, 8, 7), "2": (DP, 3, 3)}), r1=dump({"1": (TP, 7, 7)}), r2=dump({"2": (DP, 4, 3)}))
    assert result == Attribution((1,), (), ())
    assert attribution_text(result) == "rank 1 did not begin what the others wait in"


def test_rank_in_a_collective_that_others_have_left_is_stuck() -> None:
    result = judged(r0=dump({"1": (TP, 20, 7)}), r1=dump({"1": (TP, 20, 19)}))
    assert result == Attribution((0,), (0,), ())


def test_receiver_waits_for_whom_sends_nothing() -> None:
    result = judged(r0=dump({"1": (TP, 0, 0)}, ("1", "recv 0<-1")), r1=dump({"1": (TP, 0, 0)}))
    assert result.ranks == (1,)
    both = judged(r0=dump({"1": (TP, 0, 0)}, ("1", "recv 0<-1")), r1=dump({"1": (TP, 0, 0)}, ("1", "send 1->0")))
    assert both == Attribution((), (), ())


def test_collective_that_all_wait_in_and_a_circle_accuse_nobody() -> None:
    assert judged(r0=dump({"1": (TP, 8, 7)}), r1=dump({"1": (TP, 8, 7)})) == Attribution((), (), ())
    circle = judged(r0=dump({"1": (TP, 8, 7), "2": (TP, 3, 3)}), r1=dump({"1": (TP, 7, 7), "2": (TP, 4, 3)}))
    assert circle == Attribution((), (), ())


def test_rank_without_a_dump_is_silent() -> None:
    assert judged(r0=dump({"1": (TP, 8, 7)})) == Attribution((), (), (1,))


@pytest.mark.parametrize("text", [b"\x80\x04}", b"[]", b'{"entries": 7}', b'{"pg_status": {"x": {}}}', b"[" * 10**5])
def test_what_is_no_dump_in_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadDump):
        parse(text)


def test_dump_is_bounded() -> None:
    with pytest.raises(BadDump, match="bytes, more than"):
        parse(b" " * (DUMP_MAX_BYTES + 1))


def test_all_injected_ranks_of_recorded_hangs_are_named_and_nobody_else() -> None:
    body = RECORDED.read_bytes()
    cases = json.loads(lzma.decompress(body) if RECORDED.suffix == ".xz" else body)
    assert cases
    for name, case in cases.items():
        result = judged(**{f"r{rank}": dump for rank, dump in case["dumps"].items()})
        assert (list(result.ranks), result.silent) == (sorted(case["injected"]), ()), name
