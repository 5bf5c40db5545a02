"""The same flags under unicrond and under torchrun: `make megatron-lm` (each run of torchrun takes some 10 s)."""

from __future__ import annotations

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
