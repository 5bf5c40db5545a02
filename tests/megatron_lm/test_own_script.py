"""A script of a user's own, which lies outside of the checkout: BERT and T5, its own flag, its own data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import broken, furthest, same_bits, stock, told, unbroken

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
SCRIPT = str(Path(__file__).parent / "scripts" / "own.py")
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0"


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_own_script_heals_to_same_bits_and_matches_stock(server: ForkServer, tmp_path: Path, kind: str) -> None:
    flags = f"{SGD} --calculate-per-token-loss --attention-backend auto --own-model {kind}"
    spec = task(flags, script=SCRIPT)
    calm = unbroken(server, tmp_path / "calm", spec, 3)
    assert "lm loss" in calm.logs["t.1"]
    healed = broken(server, tmp_path / "healed", spec, "kill@iteration=3,micro_batch=1", joins=False)
    assert healed.iterations[3].micro_batches_repeated == 2
    assert same_bits(healed.shards, calm.shards)
    apart = furthest(healed.shards, stock(tmp_path / "stock", f"{MODEL} {flags}", 3, script=SCRIPT))
    told(f"{kind}: {apart:.2g} from stock DP3")
    assert apart <= 1e-7
