"""Where workers get cgroups: found in what the kernel tells, and refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicrond.agents.fork_server.cgroups import NoCgroup, own_cgroup, prepare

V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
HYBRID = "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" + V2.replace(
    "cgroup rw", "cgroup/unified rw"
)
INSIDE = "30 24 0:26 /docker/c1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "found"),
    [
        ("0::/system.slice/unicron-agent.service\n", V2, "/sys/fs/cgroup/system.slice/unicron-agent.service"),
        ("0::/\n", V2, "/sys/fs/cgroup"),
        ("4:memory:/elsewhere\n0::/a\n", HYBRID, "/sys/fs/cgroup/unified/a"),
        ("0::/docker/c1/agent\n", INSIDE, "/sys/fs/cgroup/agent"),
        ("0::/../other\n", INSIDE, "/sys/fs/cgroup"),
    ],
)
def test_cgroup_lookup_finds_own_cgroup(tmp_path: Path, cgroup: str, mounts: str, found: str) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts)
    assert own_cgroup(tmp_path) == Path(found)


def test_cgroup_lookup_needs_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/a\n")
    (tmp_path / "mountinfo").write_text(HYBRID)
    with pytest.raises(NoCgroup, match="no cgroup v2 is mounted"):
        own_cgroup(tmp_path)


def test_cgroup_preparation_leaves_other_directories_unchanged(tmp_path: Path) -> None:
    with pytest.raises(NoCgroup, match="is not a cgroup"):
        prepare(tmp_path, "n1", ())
    assert not [*tmp_path.iterdir()]
    with pytest.raises(NoCgroup, match="cannot be written to"):
        prepare(tmp_path / "nowhere", "n1", ())


def test_cgroup_limit_needs_its_controller(tmp_path: Path) -> None:
    place = tmp_path / "unicron-n1"
    place.mkdir()
    (place / "cgroup.procs").touch()
    assert prepare(tmp_path, "n1", ["memory.max", "pids.max"]) == place
    assert (
        (tmp_path / "cgroup.subtree_control").read_text() == (place / "cgroup.subtree_control").read_text() == "+pids"
    )
    (place / "cgroup.subtree_control").unlink()
    (place / "cgroup.subtree_control").mkdir()  # as the kernel refuses where processes are
    with pytest.raises(NoCgroup, match="controller memory cannot be had"):
        prepare(tmp_path, "n1", ["memory.max"])
