"""What of the adapter for Megatron-LM needs no Megatron-LM: data, lists, weights, the layout of sums, writers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from unicrond.agents.trainer.groups.shared_results import SharedResults
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.megatron.buffers import SLOTS, BufferAccumulation, buffer_layout
from unicrond.agents.trainer.megatron.data import EvaluationLoader, MicroBatchLoader, ValidationLoader
from unicrond.agents.trainer.megatron.evaluation import Evaluation, Evaluations
from unicrond.agents.trainer.megatron.logs import LeadWriter, Trackers
from unicrond.agents.trainer.megatron.runs import _fitting, _Weighing
from unicrond.agents.trainer.process import cpu_shim
from unicrond.events.vocabulary import StoreAddress

SAMPLES = 20


def loader(dataset: Any, consumed: int) -> Any:
    """Megatron's single sampler: batches of two, from a number of samples on, until the data set ends."""
    lists = [[first, first + 1] for first in range(consumed % SAMPLES, SAMPLES, 2)]
    return SimpleNamespace(
        batch_sampler=lists, collate_fn=lambda samples: [one for sample in samples for one in sample]
    )


DATASET = [[index] for index in range(SAMPLES)]


def read(data: MicroBatchLoader, iteration: int, micro_batches: list[int]) -> list[Any]:
    data.request(iteration, micro_batches)
    return [next(data) for _ in micro_batches]


def test_loader_reads_only_dealt_micro_batches() -> None:
    data = MicroBatchLoader(loader, DATASET, global_batch=6, micro_batch=2)
    assert read(data, 1, [0, 2]) == [[0, 1], [4, 5]]
    assert read(data, 1, [1]) == [[2, 3]]  # another replica's, after its death
    assert read(data, 2, [2]) == [[10, 11]]


def test_loader_seeks_to_requested_iteration() -> None:
    data = MicroBatchLoader(loader, DATASET, global_batch=6, micro_batch=2)
    assert read(data, 3, [0]) == [[12, 13]]
    assert read(data, 2, [0]) == [[6, 7]]
    assert read(data, 3, [2]) == [[16, 17]]


def test_loader_wraps_epoch_inside_iteration() -> None:
    data = MicroBatchLoader(loader, DATASET, global_batch=6, micro_batch=2)
    assert read(data, 4, [0, 1, 2]) == [[18, 19], [0, 1], [2, 3]]
    assert read(data, 5, [0]) == [[4, 5]]


class Watched(list[Any]):
    """A data set that tells what was read, and by which thread."""

    def __init__(self) -> None:
        super().__init__(DATASET)
        self.read: list[tuple[int, str]] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append((index, threading.current_thread().name))
        return super().__getitem__(index)


def test_evaluation_reads_nothing_of_the_other_split() -> None:
    """Which of them Megatron reads, nobody says before it does."""
    splits = {"valid": Watched(), "test": Watched()}
    context: Any = SimpleNamespace(launch=SimpleNamespace(task="t"), sharers=1)
    evaluations = Evaluations(context)
    loaders = {
        split: evaluations.add_loader(
            split, EvaluationLoader(loader, dataset, global_batch=4, micro_batch=2, reads_ahead=True)
        )
        for split, dataset in splits.items()
    }
    seen: list[Any] = []

    def evaluate(_: Any, micro_batches: list[int], options: Any, request: Any) -> list[Any]:
        request(micro_batches)
        seen.extend(next(loaders[options["split"]]) for _ in micro_batches)
        return []

    runs: Any = SimpleNamespace(evaluate=evaluate)
    for split in ("valid", "test"):
        evaluations._present = Evaluation(context, 2)
        for _ in range(2):
            evaluations.compute(runs, lambda **_: None, {"num_microbatches": 2, "split": split})
        assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
        seen.clear()
        if split == "valid":
            assert not splits["test"].read
    for data in loaders.values():
        assert data._reader is not None
        data._reader.shutdown()
    assert len(splits["valid"].read) == len(splits["test"].read), "nor of the first by the second"


def test_last_evaluation_leaves_nothing_in_the_store() -> None:
    """Two replicas: each computes two micro-batches of four, both have the sum of all."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = store.num_keys()
    alone: Any = SimpleNamespace(shard=0, size=1, sharers=1, device="cpu", highest=lambda *numbers: list(numbers))

    def forward(call: int, micro_batches: list[int]) -> list[dict[str, Any]]:
        return [{"loss": torch.tensor([float(10 * call + number), 1.0])} for number in micro_batches]

    def evaluate(rank: int) -> list[float]:
        results = SharedResults("big")
        results.begin(StoreAddress(host="127.0.0.1", port=store.port), "3/7/valid")
        evaluation = Evaluation(alone, 2, results, rank, 2)
        assert evaluation.compute(forward, 2) == [{}]
        total: list[float] = evaluation.compute(forward, 2)[0]["loss"].tolist()
        results.are_there(["0/0"])  # which its thread answers once it has left
        return total

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(evaluate, range(2))) == [[22.0, 4.0]] * 2
    assert store.num_keys() == before


def test_loader_thread_reads_ahead() -> None:
    watched = Watched()
    data = MicroBatchLoader(loader, watched, global_batch=6, micro_batch=2, reads_ahead=True)
    data.request(1, [0], [1])
    assert next(data) == [0, 1]
    data.request(1, [1])
    assert next(data) == [2, 3]
    data.request(2, [0], [1])  # as was guessed
    assert next(data) == [6, 7]
    data.request(2, [2])  # another one than was dealt before
    assert next(data) == [10, 11]
    assert {name.partition("_")[0] for _, name in watched.read} == {"data"}
    assert [index for index, _ in watched.read].count(6) == 1
    data.request(7, [1])
    assert next(data) == [18, 19]


def test_read_ahead_error_appears_on_request() -> None:
    watched = Watched()
    data = MicroBatchLoader(
        lambda dataset, at: SimpleNamespace(batch_sampler=[[0], [99]], collate_fn=list), watched, 2, 1, reads_ahead=True
    )
    data.request(1, [0], [1])
    assert next(data) == [[0]]
    data.request(1, [1])
    with pytest.raises(IndexError):
        next(data)


def test_validation_starts_at_consumed_samples() -> None:
    consumed = [4]
    data = iter(ValidationLoader(lambda dataset, at: dataset[at:], DATASET, lambda: consumed[0]))
    consumed[0] = 8
    assert next(data) == [8]


@pytest.mark.parametrize("micro_batches", range(2, 30))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_interleaved_group_size_fits_any_list(micro_batches: int, stages: int) -> None:
    if micro_batches < stages:
        return
    size = _fitting(stages, micro_batches, stages)
    assert stages <= size <= micro_batches
    assert micro_batches % size == 0 or micro_batches % size >= stages


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("length", [1, 3, 41, 49])
def test_gradient_bits_are_independent_of_list_length(per_token: bool, length: int) -> None:
    """Whatever the schedule divides the loss by."""
    weigh = _Weighing(lambda loss: loss * 8.0, per_token=per_token)
    weight = torch.tensor([3.0, 5.0], requires_grad=True)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return output.sum(), torch.tensor(7), {"lm loss": output.detach()}

    loss, tokens, _ = weigh.wrap(loss_func, counts=True)(weight * 2.0)
    loss /= torch.clamp(tokens, min=1)
    loss /= length
    (loss * 1000.0).backward()
    assert weight.grad is not None
    share = 1.0 if per_token else 1.0 / torch.tensor(7.0)
    assert torch.equal(weight.grad, torch.full((2,), 2.0) * (8.0 * share))
    total, count = weigh.total()
    assert count == (7 if per_token else 1)
    assert total == pytest.approx(16.0 if per_token else 16.0 / 7, abs=1e-6)


def test_filler_micro_batch_has_no_weight() -> None:
    weigh = _Weighing(lambda loss: loss, per_token=False)
    weight = torch.tensor(3.0, requires_grad=True)
    loss, _ = weigh.wrap(lambda output: (output, {}), counts=False)(weight * 2.0)
    loss.backward()
    assert weight.grad is not None and float(weight.grad) == 0.0
    assert weigh.total() == (0.0, 0)


# --- sums ----------------------------------------------------------------------------------------


class Chunk(torch.nn.Module):
    """A model that Megatron's DistributedDataParallel has wrapped, as far as sums are concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)
        parameters = list(self.parameters())
        index, end = {}, 0
        for parameter in reversed(parameters):
            index[parameter] = end, end + parameter.numel(), 0
            end += parameter.numel() + 1  # padding
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, parameter=parameter: self._added(parameter))
            parameter._node = node
        grad_data = torch.zeros(end)
        bucket = SimpleNamespace(offset=0, grad_data=grad_data)
        self.buffers_of_it = SimpleNamespace(
            params=parameters, param_index_map=index, numel=end, grad_data=grad_data, buckets=[bucket]
        )

    @staticmethod
    def _added(parameter: torch.nn.Parameter) -> None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def chunk() -> Any:
    made = Chunk()
    wrapped: Any = torch.nn.ModuleList([made])
    wrapped.__dict__["buffers"] = [made.buffers_of_it]
    wrapped.__dict__["expert_parallel_buffers"] = []
    return wrapped


def backward(wrapped: Any, value: float) -> None:
    model = wrapped[0]
    with torch.no_grad():
        model.local_tokens_per_expert += torch.tensor([value, 0.0, 0.0, 1.0])
    model.second(model.first(torch.full((1, 3), value))).sum().backward()


def test_megatron_buffers_alias_first_sum() -> None:
    wrapped = chunk()
    sums = BufferAccumulation([wrapped], 0, 1, None, 1 << 20)
    backward(wrapped, 2.0)
    buffer = wrapped[0].buffers_of_it
    assert buffer.grad_data.data_ptr() == sums.present.flat.data_ptr() == buffer.buckets[0].grad_data.data_ptr()
    assert float(wrapped[0].second.bias.main_grad) == 1.0
    parts = sum(float(p.main_grad.double().sum()) for p in wrapped.parameters())
    assert float(buffer.grad_data.double().sum()) == pytest.approx(parts)
    buffer.grad_data.zero_()
    assert not wrapped[0].first.weight.main_grad.any()


def test_lane_sum_includes_counters_of_its_micro_batches() -> None:
    wrapped = chunk()
    sums = BufferAccumulation([wrapped], 2, 1, Lanes(4, 2), 1 << 20)
    seen = []
    for lane, value in ((0, 2.0), (1, 3.0)):
        sums.select_lane(lane)
        backward(wrapped, value)
        sums.present.slots[0] += value
        sums.present.tracked[1] += value
        seen.append((sums.present.flat.data_ptr(), wrapped[0].first.weight.main_grad.clone()))
        sums.sums.end(lane)
    assert seen[0][0] != seen[1][0]
    total = sums.sums.of_blocks[0, 1].flat + sums.sums.of_blocks[1, 2].flat
    sums.settle([(start, total[start:stop]) for start, stop in sums.spans], 5.0)
    assert torch.allclose(wrapped[0].first.weight.main_grad, (seen[0][1] + seen[1][1]) / 5.0)
    assert float(sums.present.slots[0]) == 5.0 and float(sums.present.tracked[1]) == 5.0  # not divided
    assert wrapped[0].local_tokens_per_expert.tolist() == [5.0, 0.0, 0.0, 2.0]


def test_scratch_gradients_enter_no_sum() -> None:
    wrapped = chunk()
    sums = BufferAccumulation([wrapped], 0, 1, Lanes(2, 1), 1 << 20)
    with sums.scratch_store() as gradients:
        backward(wrapped, 2.0)
        assert gradients.any()
    sums.select_lane(0)
    assert not sums.present.flat.any()
    assert not wrapped[0].local_tokens_per_expert.any()


def test_buckets_follow_backward_order() -> None:
    wrapped = chunk()
    plan = buffer_layout([wrapped[0].buffers_of_it], 4, SLOTS)
    end = wrapped[0].buffers_of_it.numel
    assert plan.spans[0] == (end, end + SLOTS)
    assert plan.spans[-1][0] == 0  # the last layer's bias, which is finished first
    assert [plan.spans[bucket] for bucket in plan.bucket_of] == [
        (start, start + parameter.numel())
        for start, parameter in zip(plan.starts, reversed(list(wrapped.parameters())), strict=True)
    ]


def test_writers_write_only_on_leader() -> None:
    leads, made = [False], []

    class Real(list[Any]):
        def add_scalar(self, *what: Any) -> None:
            self.append(what)

    def make() -> Any:
        made.append(Real())
        return made[-1]

    writer = LeadWriter(lambda: leads[0], make)
    assert not writer
    writer.add_scalar("loss", 1.0, 1)
    writer.config.update({"a": 1})
    assert not made
    leads[0] = True
    assert writer
    writer.add_scalar("loss", 2.0, 2)
    assert made == [[("loss", 2.0, 2)]]


@pytest.mark.filterwarnings("ignore:save_to_aux_losses_tracker:DeprecationWarning")
def test_tracked_losses_travel_with_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this Megatron-core's own trackers, whatever it calls them: else the lead logs its own share alone."""
    cpu_shim.apply()
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    save = getattr(MTPLossLoggingHelper, "save_metrics_to_tracker", None)  # core_v0.19
    if save is None:
        MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(5.0), 0, 2)
    else:
        save(torch.tensor(5.0), torch.tensor(3.0), torch.tensor(4.0), 0, 2)
    save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(7.0), 1, 2)
    tracked = [value for value in MTPLossLoggingHelper.tracker.values() if torch.is_tensor(value)]
    trackers = Trackers(SimpleNamespace(num_layers=2, num_moe_experts=4))
    room = torch.zeros(trackers.numel)
    total = 7.0 + sum(float(value.sum()) for value in tracked)
    trackers.take(room)
    assert float(room.sum()) == total and not any(float(value.sum()) for value in tracked)
    trackers.put_back(2 * room)
    assert sum(float(value.sum()) for value in tracked) == 2 * (total - 7.0)


def test_tracked_losses_take_as_much_room_as_with_older_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of two versions in one group sum buckets of one length: three losses of experts, one of prediction."""
    cpu_shim.apply()
    monkeypatch.delattr(MTPLossLoggingHelper, "save_metrics_to_tracker", raising=False)
    trackers = Trackers(SimpleNamespace(num_layers=2, num_moe_experts=4))
    assert trackers.numel == 4 * 2
    monkeypatch.setattr(MTPLossLoggingHelper, "save_metrics_to_tracker", None, raising=False)  # core_v0.19
    assert trackers.numel == 7 * 2
