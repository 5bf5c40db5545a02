"""Audits of micro-batches in real training: who computes other bits is given up before its sums count.

With the budget of these tests each iteration is audited, from the second of a group on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_divergence import FLIPPED, ITERATIONS, begin, digests, names, reports, task
from unicrond.events.vocabulary import CorruptionSuspected, TaskSpec


def audited(case: str, budget: str = "0.5") -> TaskSpec:
    spec = task(case)
    return replace(spec, env={**spec.env, "UNICRON_AUDIT_BUDGET": budget})


def accusations(rig: Rig) -> set[tuple[str, str, str, int]]:
    return {(w, m.sign, m.suspect, m.iteration) for w, m in rig.said if isinstance(m, CorruptionSuspected)}


@pytest.fixture(scope="module")
def sound(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The parameters after each iteration of a run without audits."""
    directory = tmp_path_factory.mktemp("sound")
    with Rig(server, directory, audited("none", "0")) as rig:
        begin(rig, names(3))
        rig.until(lambda: rig.completed)
    return digests(directory, "t.2")


@pytest.mark.parametrize("replicas", [2, 3])
def test_audits_of_sound_replicas_change_nothing(
    server: ForkServer, tmp_path: Path, sound: dict[int, str], replicas: int
) -> None:
    with Rig(server, tmp_path, audited("none")) as rig:
        begin(rig, names(replicas))
        rig.until(lambda: rig.completed)
        assert not accusations(rig) and not reports(rig)
    for worker in names(replicas):
        assert digests(tmp_path, worker) == sound
        assert "no more audits" not in (tmp_path / f"{worker}.log").read_text()


@pytest.mark.parametrize("case", ["hiccup", "sick", "loose"])
@pytest.mark.parametrize("culprit", [1, 3])
def test_replica_with_other_bits_is_given_up_before_its_sums_count(
    server: ForkServer, tmp_path: Path, sound: dict[int, str], case: str, culprit: int
) -> None:
    workers = names(3)
    others = [worker for worker in workers if worker != f"t.{culprit}"]
    spec = replace(audited(case), args=(case, str(culprit), str(FLIPPED)))
    with Rig(server, tmp_path, spec) as rig:
        begin(rig, workers)
        wanted = {(worker, "micro_batch", f"t.{culprit}", FLIPPED) for worker in others}
        rig.until(lambda: accusations(rig) == wanted)
        assert not rig.reached(FLIPPED), "the iteration is not over"
        rig.signal(f"t.{culprit}", signal.SIGKILL)
        rig.tell(2, others, urgent=True)
        rig.until(lambda: rig.completed)
        assert accusations(rig) == wanted and not reports(rig)
    for worker in others:
        assert digests(tmp_path, worker) == sound, worker


@pytest.mark.parametrize("case", ["hiccup", "loose"])
def test_of_two_replicas_the_unsteady_one_is_given_up(
    server: ForkServer, tmp_path: Path, sound: dict[int, str], case: str
) -> None:
    with Rig(server, tmp_path, audited(case)) as rig:
        begin(rig, names(2))
        wanted = {(worker, "micro_batch", "t.1", FLIPPED) for worker in names(2)}
        rig.until(lambda: accusations(rig) == wanted)  # of two, one is no majority
        rig.signal("t.1", signal.SIGKILL)
        rig.tell(2, ["t.2"], urgent=True)
        rig.until(lambda: rig.completed)
    assert digests(tmp_path, "t.2") == sound


def test_two_steady_replicas_accuse_nobody(server: ForkServer, tmp_path: Path) -> None:
    with Rig(server, tmp_path, audited("sick")) as rig:
        begin(rig, names(2))
        rig.until(lambda: rig.completed)
        assert not accusations(rig) and not reports(rig)
    for worker in names(2):
        assert (tmp_path / f"{worker}.log").read_text().count("no more audits: two replicas have steady bits") == 1
    assert len(digests(tmp_path, "t.1")) == ITERATIONS
