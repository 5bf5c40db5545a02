"""What cgroups allow, as seen from inside a container: real samples of /proc over written trees, and this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unicrond.agents.host import host_resources as host
from unicrond.agents.host import oom_kill_counts as kill_counts
from unicrond.agents.host.host_resources import Mount, cgroup_mounts, places
from unicrond.agents.host.oom_kill_counts import KillCounts, cause, oom_counter
from unicrond.agents.shell import cli, flag_values

ROOT_MOUNT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
#: Of a pod under containerd with cgroup v1: the kernel names the machine's path, the mount begins at the container.
POD = "/kubepods/burstable/pod5f5c6e0e-4b4c/3d9b1f"
V1_POD = (
    f"9:memory:{POD}\n4:cpu,cpuacct:{POD}\n0::/\n",
    f"1054 1052 0:33 {POD} {{at}}/memory ro,nosuid,noexec master:15 - cgroup cgroup rw,memory\n"
    f"1055 1052 0:30 {POD} {{at}}/cpu,cpuacct ro,nosuid,noexec master:12 - cgroup cgroup rw,cpu,cpuacct\n",
    "memory",
)
#: With a cgroup namespace of its own (Docker, containerd on version 2), and without one.
V2_PRIVATE = ("0::/\n", "1060 1050 0:27 / {at} ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n", ".")
V2_SHARED = (f"0::{POD}\n", f"1060 1050 0:27 {POD} {{at}} ro,relatime - cgroup2 cgroup rw\n", ".")
#: systemd, hybrid: version 2 is mounted without a controller.
HYBRID = (
    "5:memory:/system.slice/unicron-agent.service\n1:name=systemd:/system.slice\n0::/system.slice/unicron-agent.service\n",
    "40 30 0:35 / {at}/unified rw,nosuid - cgroup2 cgroup2 rw\n"
    "41 30 0:36 / {at}/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n",
    "memory/system.slice/unicron-agent.service",
)
#: Moved out of what is mounted: the mount's own directory is the nearest that can be seen.
ESCAPED = ("0::/../other\n", "30 24 0:26 /docker/c1 {at} rw - cgroup2 cgroup2 rw\n", ".")


def machine(directory: Path, cgroup: str, mountinfo: str, pid: str = "self") -> Path:
    """A /proc with one process; its cgroups are mounted below `directory`/cgroup."""
    proc = directory / "proc"
    for one in {pid, "self"}:
        (proc / one).mkdir(parents=True, exist_ok=True)
    (proc / pid / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(ROOT_MOUNT + mountinfo.format(at=directory / "cgroup"))
    return proc


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize("sample", [V1_POD, V2_PRIVATE, V2_SHARED, HYBRID, ESCAPED])
def test_memory_cgroup_is_found_at_its_mount(tmp_path: Path, sample: tuple[str, str, str]) -> None:
    cgroup, mountinfo, wanted = sample
    proc = machine(tmp_path, cgroup, mountinfo, "4711")
    found = places("memory", proc / "4711", proc / "self")
    assert found[0].directory == tmp_path / "cgroup" / wanted
    assert found[0].version == (1 if "memory" in wanted else 2)


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    proc = machine(tmp_path, *V1_POD[:2])
    memory, cpu = tmp_path / "cgroup" / "memory", tmp_path / "cgroup" / "cpu,cpuacct"
    found, of_cpu = places("memory", proc / "self", proc / "self"), places("cpu", proc / "self", proc / "self")
    assert host.cgroup_memory_limit_bytes(found) is None and host.cgroup_cpu_limit(of_cpu) is None  # cannot be read
    write(memory, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert host.cgroup_memory_limit_bytes(found) is None and host.cgroup_memory_free_bytes(found) is None
    assert host.cgroup_cpu_limit(of_cpu) is None
    write(memory, memory__limit_in_bytes=512 << 20, memory__usage_in_bytes=300 << 20)
    write(
        memory, memory__stat=f"cache 1\ntotal_inactive_file {100 << 20}", memory__oom_control="under_oom 0\noom_kill 3"
    )
    write(cpu, cpu__cfs_quota_us=250000)
    assert host.cgroup_memory_limit_bytes(found) == 512 << 20
    assert host.cgroup_memory_free_bytes(found) == 312 << 20
    assert host.cgroup_cpu_limit(of_cpu) == 2.5
    assert oom_counter(found) == memory / "memory.oom_control"


def test_cgroup_v2_limits_apply_from_any_level(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/pod/worker\n", V2_PRIVATE[1])
    top = tmp_path / "cgroup"
    found = places("memory", proc / "self", proc / "self")
    write(top / "pod" / "worker", memory__max="max", memory__current=10, cpu__max="max 100000")
    assert host.cgroup_memory_limit_bytes(found) is None and host.cgroup_cpu_limit(found) is None
    write(top / "pod", memory__max=1 << 30, memory__current=1 << 29, cpu__max="150000 100000")
    write(top, memory__max=4 << 30, memory__current=7 << 29, memory__events="low 0\noom_kill 1")
    assert host.cgroup_memory_limit_bytes(found) == 1 << 30
    assert host.cgroup_memory_free_bytes(found) == 1 << 29, "of the two with a limit the fuller one"
    assert host.cgroup_cpu_limit(found) == 1.5
    assert oom_counter(found) == top / "memory.events"
    write(top / "pod", memory__current=2 << 30)
    assert host.cgroup_memory_free_bytes(found) == 0, "a limit that was lowered under its use"


#: What a container of a pod reads on Linux 6.12, where kubelet gives it 512 MiB, 0.5 CPU and a group that dies as one.
V2_FILES = {
    "cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc",
    "cpu.max": "50000 100000",
    "memory.current": "536571904",
    "memory.high": "max",
    "memory.max": "536870912",
    "memory.oom.group": "1",
    "memory.swap.max": "0",
    "memory.stat": "anon 317194240\nfile 209715200\nkernel 9662464\nkernel_stack 458752\npagetables 2154496\n"
    "sec_pagetables 0\npercpu 2880\nsock 0\nvmalloc 49152\nshmem 104857600\nzswap 0\nzswapped 0\nfile_mapped 14364672\n"
    "file_dirty 0\nfile_writeback 0\nswapcached 0\nanon_thp 0\nfile_thp 0\nshmem_thp 0\ninactive_anon 422051840\n"
    "active_anon 0\ninactive_file 83886080\nactive_file 20971520\nunevictable 0\nslab_reclaimable 4812800",
    "memory.events": "low 0\nhigh 0\nmax 35\noom 0\noom_kill 0\noom_group_kill 0",
    "memory.events.local": "low 0\nhigh 0\nmax 35\noom 0\noom_kill 0\noom_group_kill 0",
}


def test_cgroup_v2_pod_reads_kernel_files(tmp_path: Path) -> None:
    proc = machine(tmp_path, *V2_PRIVATE[:2])
    top = tmp_path / "cgroup"
    top.mkdir()
    for name, text in V2_FILES.items():
        (top / name).write_text(f"{text}\n")
    boot = proc / "sys" / "kernel" / "random" / "boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("8f0a1c3e-1111-4222-8333-444455556666\n")
    (proc / "vmstat").write_text("nr_free_pages 81230\noom_kill 4\nthp_fault_alloc 0\n")
    found = places("memory", proc / "self", proc / "self")
    assert host.cgroup_memory_limit_bytes(found) == 512 << 20
    assert host.cgroup_memory_free_bytes(found) == (512 << 20) - 536571904 + 83886080, "shm stays"
    assert host.cgroup_cpu_limit(places("cpu", proc / "self", proc / "self")) == 0.5

    # The whole group is killed: three processes. Agent and workers share it, so only one that lives on there can ask.
    before = kill_counts.look(proc)
    assert (before.kills, before.machine) == (0, 4)
    events = "low 0\nhigh 0\nmax 61\noom 1\noom_kill 3\noom_group_kill 1\n"
    (top / "memory.events").write_text(events)
    (proc / "vmstat").write_text("nr_free_pages 91230\noom_kill 7\nthp_fault_alloc 0\n")
    assert cause(before, kill_counts.look(proc)) == "oom_killed"

    # The next container of the pod has a cgroup of its own, which has counted nothing.
    top.rename(tmp_path / "gone")
    top.mkdir()
    for name, text in V2_FILES.items():
        (top / name).write_text(f"{text}\n")
    assert cause(before, kill_counts.look(proc)) == "maybe_oom_killed"


def test_mount_parser_decodes_octal_escapes() -> None:
    (mount,) = cgroup_mounts("30 24 0:26 /a\\040b /sys/fs/c\\134d rw - cgroup2 cgroup2 rw\n")
    assert mount == Mount(2, "/a b", Path("/sys/fs/c\\d"), frozenset())


NAMES = st.text(st.sampled_from("ab.-_:0"), min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, max_size=4).map(lambda parts: "/" + "/".join(parts))


@example(root="/", below="/..0", place="/", optional=[])
@given(root=PATHS, below=PATHS, place=PATHS, optional=st.lists(st.sampled_from(["shared:1", "master:2"]), max_size=2))
def test_cgroup_path_resolves_below_its_mount(
    tmp_path_factory: pytest.TempPathFactory, root: str, below: str, place: str, optional: list[str]
) -> None:
    proc = tmp_path_factory.mktemp("proc")
    path = root.rstrip("/") + below if below != "/" else root
    (proc / "cgroup").write_text(f"12:pids:/x\n4:memory:{path}\n")
    fields = " ".join(["33 23 0:31", root, f"/sys{place}", "rw,relatime", *optional])
    (proc / "mountinfo").write_text(f"{ROOT_MOUNT}{fields} - cgroup cgroup rw,memory\n")
    (found,) = places("memory", proc, proc)
    assert found.directory == Path(f"/sys{place}" + ("" if below == "/" else below))
    assert found.top == Path(f"/sys{place}") and [*found.upwards()][-1] == found.top


@given(cgroup=st.text(max_size=60), mountinfo=st.text(max_size=80))
def test_nonsense_in_proc_reads_as_unknown(
    tmp_path_factory: pytest.TempPathFactory, cgroup: str, mountinfo: str
) -> None:
    proc = tmp_path_factory.mktemp("proc")
    (proc / "cgroup").write_bytes(cgroup.encode("utf-8", "replace"))
    (proc / "mountinfo").write_bytes(("31 23 0:29 / /x rw - cgroup2 c rw\n" + mountinfo).encode("utf-8", "replace"))
    found = places("memory", proc, proc)
    assert host.cgroup_memory_limit_bytes(found) is None and oom_counter(found) is None


def test_missing_proc_reads_as_unknown(tmp_path: Path) -> None:
    assert places("memory", tmp_path, tmp_path) == []
    assert host.cgroup_memory_limit_bytes([]) is host.cgroup_cpu_limit([]) is oom_counter([]) is None


# --- this machine --------------------------------------------------------------------------------


@pytest.fixture
def limited() -> Path:
    """A memory cgroup of our own with a limit, which this process is in meanwhile."""
    found = places("memory")
    if not found:
        pytest.skip("no memory cgroup is mounted here")
    own = found[0].directory / f"unicron-limit-{os.getpid()}"
    name = "memory.limit_in_bytes" if found[0].version == 1 else "memory.max"
    try:
        own.mkdir()
        (own / name).write_text(str(768 << 20))
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        if own.is_dir():
            own.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield own
    (own.parent / "cgroup.procs").write_text(str(os.getpid()))
    own.rmdir()


def test_real_cgroup_limit_bounds_memory_figures(limited: Path) -> None:
    assert host.cgroup_memory_limit_bytes() == host.memory_total_bytes() == 768 << 20
    assert 0 <= host.memory_free_bytes() <= 768 << 20
    assert (counter := oom_counter(places("memory"))) is not None and counter.parent == limited


def test_auto_slots_follow_gpus_and_cpu_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--nats", "nats://h:1", "--node", "n1", "--run-dir", str(tmp_path), "--slots", "auto"]
    monkeypatch.setattr(flag_values, "visible_gpus", lambda: ["0", "1", "2"])
    assert cli.parse(words).slots == 3
    monkeypatch.setattr(flag_values, "visible_gpus", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "cgroup_cpu_limit", lambda: 2.5)
    assert cli.parse(words).slots == 2
    monkeypatch.setattr(host, "cgroup_cpu_limit", lambda: 0.1)
    assert cli.parse(words).slots == 1
    monkeypatch.setattr(host, "cgroup_cpu_limit", lambda: None)
    assert cli.parse(words).slots == 8


# --- kills that nothing saw ----------------------------------------------------------------------

HERE = KillCounts("b1", (1, 7), 2, 40)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (HERE, "signalled"),
        (KillCounts("b1", (1, 7), 3, 41), "oom_killed"),
        (KillCounts("b1", (1, 7), 2, 41), "signalled"),  # another container's
        (KillCounts("b1", (1, 9), 0, 41), "maybe_oom_killed"),  # a new container on the machine
        (KillCounts("b1", (1, 9), 0, 40), "signalled"),
        (KillCounts("b1", None, None, None), "unknown"),
        (KillCounts("b2", (1, 7), 0, 0), "unknown"),  # the machine was rebooted, or is another one
        (KillCounts(), "unknown"),
    ],
)
def test_kill_counts_explain_vanished_workers(now: KillCounts, told: str) -> None:
    assert cause(HERE, now) == told
    assert cause(KillCounts(), now) == "unknown"


def test_kill_counts_read_this_machine() -> None:
    found = kill_counts.look()
    assert found.boot and found.machine is not None
    assert cause(found, kill_counts.look()) in ("signalled", "oom_killed", "maybe_oom_killed")
