"""The same flags under unicrond and under torchrun: `make megatron-lm` (each run of torchrun takes some 10 s)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import broken, furthest, logged, stock, told

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
#: Without momentum a difference of gradients stays what it is.
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0"
KILL = "kill@iteration=3,micro_batch=1"


def test_healed_sgd_parameters_match_stock(server: ForkServer, tmp_path: Path) -> None:
    healed = broken(server, tmp_path / "healed", task(SGD), KILL, joins=False)
    apart = furthest(healed.shards, stock(tmp_path / "stock", f"{MODEL} {SGD}", 3))
    told(f"SGD: {apart:.2g} from stock DP3")
    assert apart <= 1e-7


def test_masked_tokens_are_averaged_by_micro_batch_as_stock(server: ForkServer, tmp_path: Path) -> None:
    """Without per-token loss each micro-batch counts alike, however many of its tokens count."""
    flags = f"{SGD} --reset-position-ids --reset-attention-mask --eod-mask-loss"
    healed = broken(server, tmp_path / "healed", task(flags), KILL, joins=False)
    alone = stock(tmp_path / "stock", f"{MODEL} {flags}", 3)
    apart = furthest(healed.shards, alone)
    ours, theirs = logged(healed.logs["t.1"]), logged((tmp_path / "stock" / "log").read_text())
    told(f"masked tokens: {apart:.2g} from stock DP3, losses {ours} and {theirs}")
    assert apart <= 1e-7 and ours == pytest.approx(theirs, abs=2e-6)


def test_healed_adam_parameters_match_stock_within_its_spread(server: ForkServer, tmp_path: Path) -> None:
    healed = broken(server, tmp_path / "healed", task(), KILL, joins=False)
    one, three = (stock(tmp_path / f"dp{n}", MODEL, n) for n in (1, 3))
    own = furthest(one, three)
    apart = min(furthest(healed.shards, one), furthest(healed.shards, three))
    told(f"Adam: {apart:.2g} from stock, which is {own:.2g} from itself between DP1 and DP3")
    assert apart <= 2 * own


def test_bf16_losses_match_stock(server: ForkServer, tmp_path: Path) -> None:
    healed = broken(server, tmp_path / "healed", task("--bf16"), KILL, joins=False)
    for ranks in (1, 3):
        stock(tmp_path / f"dp{ranks}", f"{MODEL} --bf16", ranks)
    one, three = (logged((tmp_path / f"dp{ranks}" / "log").read_text()) for ranks in (1, 3))
    ours = logged(healed.logs["t.1"])
    assert len(ours) == len(one) == len(three) == 5
    own = max(abs(a - b) for a, b in zip(one, three, strict=True))
    apart = max(min(abs(a - b), abs(a - c)) for a, b, c in zip(ours, one, three, strict=True))
    told(f"bf16: losses {apart:.2g} from stock, which are {own:.2g} from its own between DP1 and DP3")
    assert apart <= max(2 * own, 2e-6)  # two units of what is logged


def test_fp16_skips_iterations_as_stock(server: ForkServer, tmp_path: Path) -> None:
    """The loss scale falls until gradients are finite, rises again, and falls: as on one rank, for on several ranks
    Megatron divides by fewer micro-batches in the backward, and skips others."""
    flags = (
        f"{SGD.replace('--clip-grad 0', '--clip-grad 1')} --fp16 --initial-loss-scale 33554432 --loss-scale-window 4"
        " --hysteresis 1 --accumulate-allreduce-grads-in-fp32"
    )
    model = MODEL.replace("--train-iters 5", "--train-iters 18")
    healed = broken(server, tmp_path / "healed", task(flags, model=model), "kill@iteration=10,micro_batch=1")
    alone = stock(tmp_path / "stock", f"{model} {flags}", 1)
    ours, theirs = scales(healed.logs["t.1"]), scales((tmp_path / "stock" / "log").read_text())
    assert ours == theirs and len(ours) == 18 and {skipped for *_, skipped in ours} >= {"0", "1"}
    apart = furthest(healed.shards, alone)
    told(f"fp16 with skipped iterations: {apart:.2g} from stock DP1")
    assert apart <= 1e-7


def scales(log: str) -> list[tuple[str, ...]]:
    """Return the learning rate, the loss scale and the skips of each iteration that Megatron-LM has logged."""
    return re.findall(r"learning rate: (\S+) .*loss scale: (\S+) .*skipped iterations: +(\d+) ", log)
