"""What sightings of a GPU amount to, rule by rule."""

from __future__ import annotations

from unicrond.agents.accelerators.diagnosis import BURST_S, QUIET_S, RECURS_S, SUSTAINED, GpuFinding, History, diagnose
from unicrond.agents.accelerators.driver import GpuReading, RecoveryAction, Sighting, XidEvent


class Gpu:
    """One GPU and what was found of it so far; `now_s` is ours."""

    def __init__(self, *workers: str) -> None:
        self.history = History()
        self.workers = workers
        self.now_s = 1000.0

    def sees(self, sighting: Sighting, after_s: float = 5.0) -> tuple[GpuFinding, ...]:
        self.now_s += after_s
        self.history, findings = diagnose(self.history, sighting, self.workers, self.now_s)
        return findings

    def kinds(self, sighting: Sighting, after_s: float = 5.0) -> list[str | None]:
        return [finding.kind for finding in self.sees(sighting, after_s)]


def code(number: int, action: RecoveryAction | None = None) -> XidEvent:
    return XidEvent(code=number, action=action)


# --- codes ---------------------------------------------------------------------------------------


def test_repeat_under_other_worker_blames_gpu() -> None:
    gpu = Gpu("big.1")
    assert gpu.kinds(code(31)) == ["illegal_memory_access"]
    assert gpu.kinds(code(31), BURST_S + 1) == ["illegal_memory_access"], "the same worker: the same program"
    gpu.workers = ("big.2",)
    (finding,) = gpu.sees(code(31))
    assert finding.kind == "gpu_broken" and "again on this GPU" in finding.message
    gpu.workers = ("big.3",)
    assert gpu.kinds(code(31), RECURS_S + 1) == ["illegal_memory_access"], "long ago is not again"


def test_burst_counts_as_one_event() -> None:
    gpu = Gpu("big.1")
    assert [len(gpu.sees(code(13), 0.01)) for _ in range(50)] == [1] + [0] * 49
    assert gpu.kinds(code(13), BURST_S + 1) == ["illegal_memory_access"]


def test_driver_recovery_action_overrides_table() -> None:
    assert Gpu("big.1").kinds(code(94, "reset")) == ["gpu_broken"]
    assert Gpu("big.1").kinds(code(48, "reset")) == ["ecc_error"], "which kind of broken the code still says"
    assert Gpu("big.1").kinds(code(74, "none")) == ["gpu_fault"], "not fatal"
    assert Gpu("big.1").kinds(code(31, "none")) == ["illegal_memory_access"]
    assert Gpu("big.1").kinds(code(43, "none")) == [None]


def test_xid_154_follows_driver_recovery_action() -> None:
    actions: list[RecoveryAction] = ["reset", "reboot", "drain", "other"]
    for action in actions:
        (finding,) = Gpu("big.1").sees(code(154, action))
        assert finding.kind == "gpu_broken" and "needs" in finding.message
    (finding,) = Gpu("big.1").sees(code(154, "none"))
    assert finding.kind is None and "needs nothing" in finding.message


def test_symptom_names_code_that_explains_it() -> None:
    gpu = Gpu("big.1")
    gpu.sees(code(31))
    (finding,) = gpu.sees(code(45))
    assert finding.kind is None and "after XID 31" in finding.message
    (alone,) = Gpu("big.1").sees(code(45))
    assert "after" not in alone.message


# --- readings ------------------------------------------------------------------------------------


def test_first_reading_sets_baseline_of_counters() -> None:
    gpu = Gpu("big.1")
    assert (
        gpu.sees(GpuReading(ecc_volatile=7, ecc_aggregate=90, links_up=3, link_errors=10**6, link_recoveries=4)) == ()
    )
    assert gpu.kinds(GpuReading(ecc_volatile=8, ecc_aggregate=91)) == ["ecc_error"]
    assert gpu.sees(GpuReading(ecc_volatile=8, ecc_aggregate=91)) == ()
    assert gpu.sees(GpuReading(ecc_volatile=0, ecc_aggregate=91)) == (), "the driver was loaded anew"


def test_errors_reported_by_code_are_not_repeated() -> None:
    gpu = Gpu("big.1")
    gpu.sees(GpuReading(ecc_volatile=0, links_up=18))
    assert gpu.kinds(code(94)) == ["gpu_fault"]
    assert gpu.sees(GpuReading(ecc_volatile=1, links_up=18)) == ()
    assert gpu.kinds(GpuReading(ecc_volatile=2, links_up=18), BURST_S + 1) == ["ecc_error"]
    assert gpu.kinds(code(74)) == ["nvlink_error"]
    assert gpu.sees(GpuReading(ecc_volatile=2, links_up=17)) == ()


def test_gpu_errors_without_recovery_action_restart_process() -> None:
    gpu = Gpu("big.1")
    gpu.sees(GpuReading(action="none", ecc_volatile=0))
    assert gpu.kinds(GpuReading(action="none", ecc_volatile=1)) == ["gpu_fault"]


def test_link_loss_is_error_and_link_return_is_not() -> None:
    gpu = Gpu("big.1")
    gpu.sees(GpuReading(links_up=18))
    (finding,) = gpu.sees(GpuReading(links_up=16))
    assert finding.kind == "nvlink_error" and "2 of 18" in finding.message
    assert gpu.sees(GpuReading(links_up=18)) == ()


def test_gpu_state_is_reported_at_start_and_to_each_new_worker() -> None:
    for reading, kind in (
        (GpuReading(is_lost=True), "gpu_broken"),
        (GpuReading(action="reboot"), "gpu_broken"),
        (GpuReading(rows_failed=True), "ecc_error"),
    ):
        gpu = Gpu("big.1")
        assert gpu.kinds(reading) == [kind], "also in the first reading"
        assert gpu.sees(reading) == ()
        gpu.workers = ()
        assert gpu.sees(reading) == ()
        gpu.workers = ("big.2",)
        assert gpu.kinds(reading) == [kind]
        assert gpu.sees(reading) == ()
        assert gpu.sees(GpuReading()) == ()
        assert gpu.kinds(reading) == [kind], "it had gone, and is back"


def test_counters_of_lost_gpu_resume() -> None:
    gpu = Gpu("big.1")
    gpu.sees(GpuReading(ecc_volatile=1, links_up=4))
    assert gpu.kinds(GpuReading(is_lost=True)) == ["gpu_broken"]
    assert gpu.kinds(GpuReading(ecc_volatile=2, links_up=4)) == ["ecc_error"]


def test_throttling_is_reported_once_sustained() -> None:
    gpu = Gpu("big.1")
    hot = GpuReading(throttles=frozenset({"thermal"}))
    told = [gpu.kinds(hot) for _ in range(SUSTAINED + 20)]
    assert told == [[]] * (SUSTAINED - 1) + [[None]] + [[]] * 20
    assert gpu.sees(GpuReading()) == ()
    assert [gpu.kinds(hot, QUIET_S / 2) for _ in range(SUSTAINED)] == [[], [], [None]]


def test_noisy_or_retrained_links_are_reported() -> None:
    gpu = Gpu("big.1")
    gpu.sees(GpuReading(link_errors=0, link_recoveries=0))
    assert gpu.sees(GpuReading(link_errors=20, link_recoveries=0)) == ()
    noisy = gpu.sees(GpuReading(link_errors=520, link_recoveries=2))
    assert [finding.kind for finding in noisy] == [None, None]
    assert "500 more CRC errors" in noisy[0].message and "retrained 2 more times" in noisy[1].message
    assert gpu.sees(GpuReading(link_errors=9999, link_recoveries=9)) == (), "not again so soon"


def test_pending_row_remapping_is_reported() -> None:
    (finding,) = Gpu().sees(GpuReading(rows_pending=True))
    assert finding.kind is None and "next reset" in finding.message
