"""Where checkpoints are: one contract of a directory, of fsspec's memory and of S3 (moto's server, where it is)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.integration.object_store import S3Server
from tests.trainer.test_checkpoint import same, tree
from tests.trainer.test_origins import run_of
from unicrond.agents.trainer.states import checkpoint, places
from unicrond.agents.trainer.states.origins import RunOrigin, origin_of
from unicrond.agents.trainer.states.places import ObjectPrefix, StateDirectory, StatePlace, place_of
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary.shape import Shape

Files: TypeAlias = Callable[[], dict[str, bytes]]


@pytest.fixture(params=["directory", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "ours")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}/ours"
    server: S3Server = request.getfixturevalue("s3")
    return server.url(secrets.token_hex(4))


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> ObjectPrefix:
    if request.param == "memory":
        return ObjectPrefix(f"memory://{secrets.token_hex(4)}/ours")
    server: S3Server = request.getfixturevalue("s3")
    return ObjectPrefix(server.url(secrets.token_hex(4)))


def job(
    url: str, iteration: int, shard: int = 0, shards: int = 1, origin: RunOrigin | None = None, task: str = "t",
    writer: str = "0-3",
) -> checkpoint.WriteJob:  # fmt: skip
    return checkpoint.WriteJob(url, task, iteration, 3, shard, Shape(shards), writer, 2, origin)


def write(url: str, *iterations: int, **fields: Any) -> None:
    for iteration in iterations:
        saved = checkpoint.write(job(url, iteration, **fields), tree(iteration))
        assert saved is not None and saved.path == f"{url}/iteration-{iteration:08d}"


def damage(url: str, iteration: int) -> None:
    """Remove the tensors of a checkpoint."""
    place = place_of(url)
    if isinstance(place, ObjectPrefix):
        (name,) = (name for name in names(place) if f"{iteration:08d}" in name and name.endswith("__0_0.distcp"))
        place._store.rm_file(f"{place._root}{name}")
    else:
        Path(url, f"iteration-{iteration:08d}", "shard-0", "__0_0.distcp").unlink()


def names(place: ObjectPrefix) -> list[str]:
    return sorted(path.partition(place._root)[2] for path in place._store.find(place._root))


def url_of(place: ObjectPrefix) -> str:
    return place._url


def test_place_keeps_newest_and_removes_older(url: str) -> None:
    assert checkpoint.newest_iterations(url, "t") == {}
    write(url, 1, 2, 3)
    assert list(checkpoint.newest_iterations(url, "t")) == [3, 2]
    assert same(checkpoint.load(url, "t", 3, 0)[0], tree(3))
    assert place_of(url).iterations() == [3, 2]


def test_place_takes_an_iteration_again(url: str) -> None:
    write(url, 1)
    write(url, 1, writer="1-4")
    assert same(checkpoint.load(url, "t", 1, 0)[0], tree(1))


def test_concurrent_writers_publish_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda shard: checkpoint.write(job(url, 5, shard, 4), tree(5)), range(4)))
    assert sum(result is not None for result in results) == 1
    for shard in range(4):
        assert same(checkpoint.load(url, "t", 5, shard)[0], tree(5))


def test_claim_is_its_claimants_however_often_it_asks(url: str) -> None:
    """The store has taken it and the answer was lost, or what was to follow has failed."""
    place = place_of(url)
    draft, _ = place.draft(5, "0-3")
    name = f"{draft}/publisher"
    assert [place.claim(name, f"shard-{shard}") for shard in (1, 0, 1)] == [True, False, True]


def test_write_is_published_after_a_failed_publication(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as storage:

        def refuse(*_: object, **__: object) -> None:
            raise OSError("refused")

        storage.setattr(type(place_of(url)), "publish", refuse)
        with pytest.raises(OSError, match="refused"):
            checkpoint.write(job(url, 5), tree(5))
    write(url, 5)
    assert list(checkpoint.newest_iterations(url, "t")) == [5]


def test_write_that_ends_midway_is_no_checkpoint(url: str) -> None:
    class Death(Exception):
        """The writer dies."""

    def die() -> None:
        raise Death

    write(url, 1)
    with pytest.raises(Death):
        checkpoint.write(job(url, 2), tree(2), die)
    assert checkpoint.write(job(url, 3, 0, 2), tree(3)) is None, "the other shard is missing"
    assert list(checkpoint.newest_iterations(url, "t")) == [1] == place_of(url).iterations()
    write(url, 4)
    assert place_of(url).iterations() == [4, 1]


def test_further_attempt_removes_the_draft_of_the_one_before(url: str) -> None:
    """Unless that is what is published: the store has taken its manifest, and the answer was lost."""
    attempt = job(url, 5, origin=run_of("a"))
    again = replace(attempt, writer="0-3-2", replaces=attempt.writer)

    def fail() -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        checkpoint.write(attempt, tree(5), fail)
    place = place_of(url)
    assert place.sizes_bytes(place.draft(5, again.attempt("0-3"))[0])
    checkpoint.write(again, tree(5))
    assert not place.sizes_bytes(place.draft(5, again.attempt("0-3"))[0])
    with pytest.raises(OSError, match="refused"):
        checkpoint.write(replace(again, writer="0-3-3", replaces="0-3-2"), tree(5), fail)
    assert same(checkpoint.load(url, "t", 5, 0)[0], tree(5))


def test_late_write_whose_draft_was_removed_publishes_nothing(url: str) -> None:
    """As of a lead that was held for dead: the next has tidied up before this one's last step."""
    write(url, 1)
    with pytest.raises(OSError):
        checkpoint.write(job(url, 5), tree(5), lambda: place_of(url).remove_drafts(6))
    assert place_of(url).iterations() == [1]


def test_damaged_checkpoint_costs_no_whole_one_its_place(url: str) -> None:
    write(url, 2, 3)
    damage(url, 3)
    write(url, 4)
    assert list(checkpoint.newest_iterations(url, "t")) == [4, 2]
    write(url, 5)
    assert place_of(url).iterations() == [5, 4]


def test_draft_stays_though_a_newer_checkpoint_is_damaged(url: str) -> None:
    write(url, 100)
    damage(url, 100)
    assert checkpoint.write(job(url, 50, 0, 2), tree(50)) is None
    write(url, 40)
    assert checkpoint.write(job(url, 50, 1, 2), tree(50)) is not None, "its other shard was written before"


def test_restart_puts_earlier_states_aside(url: str) -> None:
    write(url, 10, 20, origin=run_of("a"))
    write(url, 15, origin=run_of("b", "restart"))
    assert place_of(url).iterations() == [15]
    assert list(checkpoint.newest_iterations(f"{url}/before-b", "t")) == [20, 10]
    assert same(checkpoint.load(f"{url}/before-b", "t", 20, 0)[0], tree(20))


def test_failed_publication_leaves_the_origin_of_the_one_before(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest is not written; what stands there has still the settings that it was made with."""
    write(url, 10, origin=run_of("a"))
    put = type(place_of(url)).write

    def refuse_manifest(place: StatePlace, name: str, data: bytes) -> None:
        if name.endswith("manifest.json"):
            raise OSError("refused")
        put(place, name, data)

    with monkeypatch.context() as storage:
        storage.setattr(type(place_of(url)), "write", refuse_manifest)
        with pytest.raises(OSError, match="refused"):
            checkpoint.write(job(url, 10, origin=run_of("a", seed=2), writer="0-4"), tree(10))
    made = origin_of(place_of(url), 10)
    assert made is not None and made.settings["seed"] == "1"


def test_origin_is_read_where_it_was_until_now(objects: ObjectPrefix) -> None:
    url = url_of(objects)
    write(url, 10, origin=run_of("a"))
    (name,) = (name.lstrip("/") for name in names(objects) if name.endswith("made-with.json"))
    objects.write("iteration-00000010/made-with.json", objects.content(name))
    objects._store.rm_file(f"{objects._root}/{name}")
    made = origin_of(objects, 10)
    assert made is not None and made.run_id == "a"
    objects.remove(10)
    assert names(objects) == []


def test_fork_copies_newest_state_between_places(url: str, tmp_path: Path) -> None:
    write(url, 10, 20, task="big")
    for target in (f"{url}-fork", str(tmp_path / "fork")):
        checkpoint.fork(url, "big", target, "t", run_of("b", "fork"))
        assert same(checkpoint.load(target, "t", 20, 0)[0], tree(20))
    checkpoint.fork(str(tmp_path / "fork"), "t", f"{url}-back", "u", run_of("c", "fork"))
    assert same(checkpoint.load(f"{url}-back", "u", 20, 0)[0], tree(20))


def test_flipped_byte_of_an_object_fails_digest(objects: ObjectPrefix) -> None:
    write(url_of(objects), 1, 2)
    name = next(name for name in names(objects) if name.endswith("__0_0.distcp") and "00000002" in name)
    data = bytearray(objects.content(name.lstrip("/")))
    data[len(data) // 2] ^= 4
    objects.write(name.lstrip("/"), bytes(data))
    with pytest.raises(BadState, match="digest"):
        checkpoint.load(url_of(objects), "t", 2, 0)
    objects.write(name.lstrip("/"), bytes(data[:-1]))
    assert list(checkpoint.newest_iterations(url_of(objects), "t")) == [1]


def test_missing_object_makes_checkpoint_incomplete(objects: ObjectPrefix) -> None:
    write(url_of(objects), 1, 2)
    name = next(name for name in names(objects) if name.endswith("__0_0.distcp") and "00000002" in name)
    objects._store.rm_file(f"{objects._root}{name}")
    assert list(checkpoint.newest_iterations(url_of(objects), "t")) == [1]


def test_objects_of_other_programs_stay_and_are_not_read(objects: ObjectPrefix) -> None:
    others = {
        "README": b"1", "iteration-1/x": b"2", "iteration-00000002/weights.bin": b"3",
        "iteration-00000001/try-0-3/notes.txt": b"4", "iteration-00000099/shard-0/__0_0.distcp": b"5",
    }  # fmt: skip
    for name, content in others.items():
        objects.write(name, content)
    write(url_of(objects), 1, 3, 4, 5)
    assert list(checkpoint.newest_iterations(url_of(objects), "t")) == [5, 4]
    write(url_of(objects), 100, 101, origin=run_of("b", "restart"))
    for name, content in others.items():
        assert objects.content(name) == content, name


def test_manifest_cannot_lead_out_of_its_checkpoint(objects: ObjectPrefix) -> None:
    write(url_of(objects), 1, 2)
    name = "iteration-00000002/manifest.json"
    objects.write(name, objects.content(name).replace(b'"try-0-3"', b'"../iteration-00000001/try-0-3"'))
    assert list(checkpoint.newest_iterations(url_of(objects), "t")) == [1]


def test_scratch_of_killed_worker_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "unicron-state-dead"
    left.mkdir()
    with places._scratch() as ours:
        assert not left.exists() and ours.exists()
        with places._scratch() as second:
            assert ours.exists() and second != ours
    assert list(tmp_path.iterdir()) == []


def test_missing_package_of_a_scheme_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        OSError, match=r"s3://b/p needs the extra `object-store` on every node.*pip install 'unicrond\["
    ):
        place_of("s3://b/p")


def test_link_to_nothing_in_a_shards_folder_hides_no_checkpoint(tmp_path: Path) -> None:
    write(str(tmp_path), 5)
    (tmp_path / "iteration-00000005" / "shard-0" / "notes").symlink_to("nowhere")
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [5]


def test_path_is_a_directory(tmp_path: Path) -> None:
    assert isinstance(place_of(tmp_path), StateDirectory) and isinstance(place_of(str(tmp_path)), StateDirectory)
