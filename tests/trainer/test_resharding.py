"""States put together anew: every cut of a small model into every other, without Megatron."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.states.layout import layout_of
from unicrond.agents.trainer.states.resharding import NoLayout, Piece, StateLayout, reshard
from unicrond.agents.trainer.states.state import BadState

LAYERS, WIDTH, DEPTH = 4, 12, 3
WHOLE = {
    "layers.weight": torch.arange(LAYERS * WIDTH * DEPTH, dtype=torch.float32).reshape(LAYERS, WIDTH, DEPTH),
    "layers.norm": torch.arange(100.0, 100 + LAYERS * DEPTH).reshape(LAYERS, DEPTH),
    "output": torch.arange(500.0, 500 + WIDTH),
}
forms = st.sampled_from([(tp, pp) for tp in (1, 2, 3, 4) for pp in (1, 2, 4)])


def cut(form: tuple[int, int], shard: int, whole: dict[str, torch.Tensor]) -> tuple[dict[str, Any], StateLayout]:
    """The tensors of one shard by their local names, and where they lie: weights cut by tp along their width, layers by
    pp; norms are the same in all tp; the output stands in the last stage."""
    (tp, pp), tensors, pieces = form, {}, {}
    stage, rank = divmod(shard, tp)
    width = WIDTH // tp
    for number in range(LAYERS // pp):
        layer = stage * (LAYERS // pp) + number
        weight = whole["layers.weight"][layer, rank * width : (rank + 1) * width].clone()
        tensors[f"0.{number}.weight"], tensors[f"0.{number}.norm"] = weight, whole["layers.norm"][layer].clone()
        shape = tuple(weight.shape)
        pieces[f"0.{number}.weight"] = (
            Piece("layers.weight", (LAYERS, WIDTH, DEPTH), (layer, rank * width, 0), (0, 0), shape),
        )
        pieces[f"0.{number}.norm"] = (Piece("layers.norm", (LAYERS, DEPTH), (layer, 0), (0,), (DEPTH,)),)
    if stage == pp - 1:
        # In two pieces that lie the other way round here, as the halves of a gated layer do.
        half, begin = width // 2, rank * width
        mine = whole["output"][begin : begin + width]
        tensors["0.output"] = torch.cat([mine[half:], mine[:half]])
        pieces["0.output"] = (
            Piece("output", (WIDTH,), (begin,), (width - half,), (half,)),
            Piece("output", (WIDTH,), (begin + half,), (0,), (width - half,)),
        )
    return tensors, StateLayout(tp, pp, pieces, {f"state.{number}": name for number, name in enumerate(tensors)})


def state(form: tuple[int, int], shard: int, *, trained: bool = True) -> dict[str, Any]:
    """What a shard captures. Untrained: a worker that has just been started, with values of its own."""
    tensors, layout = cut(form, shard, WHOLE)
    moments, _ = cut(form, shard, {name: tensor * 2 + 1 for name, tensor in WHOLE.items()})
    return {
        "iteration": 7 if trained else 0,
        "loss": 0.5,
        "layout": msgspec.to_builtins(layout),
        "tensors": tensors if trained else {name: torch.full_like(t, -1.0) for name, t in tensors.items()},
        "optimizer": {
            "state": {
                number: {"step": torch.tensor(7.0), "exp_avg": moments[name]} for number, name in enumerate(tensors)
            }
            if trained
            else {},
            "param_groups": [
                {"lr": 0.25 if trained else 1.0, "betas": (0.9, 0.99), "params": list(range(len(tensors)))}
            ],
        },
        "scheduler": {"num_steps": 56 if trained else 0},
        "generators": {"torch": torch.tensor([1 if trained else 0]), "megatron": {"rank": torch.tensor([shard])}},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def shards(form: tuple[int, int]) -> list[dict[str, Any]]:
    return [state(form, shard) for shard in range(form[0] * form[1])]


@given(forms, forms)
def test_reshard_converts_between_any_layouts(before: tuple[int, int], after: tuple[int, int]) -> None:
    for shard in range(after[0] * after[1]):
        assert same(reshard(state(after, shard, trained=False), shards(before)), state(after, shard))


def test_resharded_steps_are_not_shared() -> None:
    made = reshard(state((1, 1), 0, trained=False), shards((2, 1)))
    made["optimizer"]["state"][0]["step"] += 1
    assert float(made["optimizer"]["state"][1]["step"]) == 7.0


def test_fp32_masters_are_split_like_parameters() -> None:
    def mixed(form: tuple[int, int], shard: int, trained: bool) -> dict[str, Any]:
        tree = state(form, shard, trained=trained)
        tensors: dict[str, torch.Tensor] = tree["tensors"]
        layout = msgspec.convert(tree["layout"], StateLayout)
        names = list(tensors)
        paths = {f"fp32_from_fp16_params.0.{number}": name for number, name in enumerate(names)}
        tree["optimizer"] = {
            "optimizer": tree["optimizer"],
            "grad_scaler": {"scale": torch.tensor([64.0 if trained else 1.0])},
            "fp32_from_fp16_params": [[tensors[name] * 3 for name in names], []],
        }
        inner = {f"optimizer.{path}": name for path, name in layout.optimizer.items()}
        tree["layout"] = msgspec.to_builtins(msgspec.structs.replace(layout, optimizer=inner | paths))
        tree["tensors"] = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return tree

    own = mixed((1, 2), 1, trained=False)
    shards_there = [mixed((2, 1), shard, trained=True) for shard in (0, 1)]
    assert same(reshard(own, shards_there), mixed((1, 2), 1, trained=True))
    del own["optimizer"]["fp32_from_fp16_params"]  # as an optimizer tells itself that keeps its tensors elsewhere
    assert same(reshard(own, shards_there), mixed((1, 2), 1, trained=True))


def grouped(form: tuple[int, int], shard: int, *, trained: bool, apart: bool, masters: bool) -> dict[str, Any]:
    """As Megatron groups parameters: norms do not decay. `apart`: weights are experts on workers of their own, which
    have an optimizer of their own. `masters`: of 16-bit parameters."""
    tree = state(form, shard, trained=trained)
    tensors, kept = tree["tensors"], tree["optimizer"]["state"]
    number_of = {name: number for number, name in enumerate(tensors)}
    norms = [name for name in tensors if name.endswith("norm")]
    weights = [name for name in tensors if name.endswith("weight")]
    others = [name for name in tensors if name not in (*norms, *weights)]
    parts, paths = [], {}
    for number, groups in enumerate([[norms, others], [weights]] if apart else [[norms, [*weights, *others]]]):
        ahead = f"{number}." if apart else ""
        inner: dict[str, Any] = {"state": {}, "param_groups": []}
        for place, name in enumerate(name for group in groups for name in group):
            inner["state"] |= {place: kept[number_of[name]]} if trained else {}
            paths[f"{ahead}{'optimizer.' * masters}state.{place}"] = name
        for group in groups:
            decay = 0.0 if group is norms else 1.0
            inner["param_groups"].append(
                {"lr": 0.25 + decay if trained else 9.0, "wd_mult": decay, "is_expert_parallel": number == 1}
                | {"params": list(range(len(group)))}
            )
        lists = [[tensors[name] * 3 for name in group] for group in groups]
        for k, group in enumerate(groups if masters else []):
            paths |= {f"{ahead}fp32_from_fp16_params.{k}.{place}": name for place, name in enumerate(group)}
        parts.append({"optimizer": inner, "fp32_from_fp16_params": lists} if masters else inner)
    tree["optimizer"] = parts if apart else parts[0]
    tree["layout"] = msgspec.to_builtins(msgspec.structs.replace(cut(form, shard, WHOLE)[1], optimizer=paths))
    return tree


@pytest.mark.parametrize("masters", [False, True])
@given(forms, forms, st.booleans(), st.booleans())
def test_experts_move_to_own_optimizer_and_back(
    masters: bool, before: tuple[int, int], after: tuple[int, int], was_apart: bool, is_apart: bool
) -> None:
    there = [
        grouped(before, shard, trained=True, apart=was_apart, masters=masters) for shard in range(before[0] * before[1])
    ]
    for shard in range(after[0] * after[1]):
        own = grouped(after, shard, trained=False, apart=is_apart, masters=masters)
        assert same(reshard(own, there), grouped(after, shard, trained=True, apart=is_apart, masters=masters))


def test_plain_optimizer_groups_match_by_position() -> None:
    def two(form: tuple[int, int], shard: int, *, trained: bool) -> dict[str, Any]:
        tree = state(form, shard, trained=trained)
        (every,) = tree["optimizer"]["param_groups"]
        decays = ((0.1, 0.0) if trained else (9.0, 9.0), (every["params"][::2], every["params"][1::2]))
        tree["optimizer"]["param_groups"] = [{"weight_decay": d, "params": own} for d, own in zip(*decays, strict=True)]
        return tree

    there = [two((2, 1), shard, trained=True) for shard in (0, 1)]
    assert same(reshard(two((1, 2), 0, trained=False), there), two((1, 2), 0, trained=True))
    with pytest.raises(NoLayout, match="optimizer: param_groups has 2 entries in the state, 1 here"):
        reshard(state((1, 2), 0, trained=False), there)


def test_reshard_names_missing_group() -> None:
    there = grouped((1, 1), 0, trained=True, apart=True, masters=False)
    there["optimizer"][0]["param_groups"].pop()
    own = grouped((1, 1), 0, trained=False, apart=False, masters=False)
    with pytest.raises(NoLayout, match="optimizer: group 1 is none of those in the state"):
        reshard(own, [there])


def test_reshard_names_missing_tensor() -> None:
    with pytest.raises(BadState, match=r"of 0\.0\.weight 18 of 36 numbers are present"):
        reshard(state((1, 1), 0, trained=False), shards((2, 1))[:1])


def test_reshard_refuses_other_model() -> None:
    odd = state((2, 1), 0)
    odd["layout"]["tensors"]["0.0.norm"][0][1] = [LAYERS, DEPTH + 1]
    with pytest.raises(NoLayout, match=r"layers\.norm is \(4, 4\) as a whole in the state, \(4, 3\) here"):
        reshard(state((1, 1), 0, trained=False), [odd])


def test_reshard_refuses_state_of_other_shape() -> None:
    odd = state((1, 1), 0)
    odd["optimizer"]["state"][0]["exp_avg"] = torch.zeros(WIDTH, 1)  # factored: one number for each row
    with pytest.raises(NoLayout, match=r"state:exp_avg: 0\.0\.weight is \(12, 3\)"):
        reshard(state((2, 1), 0, trained=False), [odd])


def test_reshard_refuses_mixed_iterations() -> None:
    mixed = [state((2, 1), 0), {**state((2, 1), 1), "iteration": 8}]
    with pytest.raises(BadState, match="iterations 7 and 8"):
        reshard(state((1, 1), 0, trained=False), mixed)


def test_reshard_needs_layout() -> None:
    with pytest.raises(NoLayout, match="does not say where its tensors lie"):
        reshard(state((1, 1), 0, trained=False), [{**state((2, 1), 0), "layout": None}])
    with pytest.raises(BadState, match="cannot read its layout"):
        reshard(state((1, 1), 0, trained=False), [{**state((2, 1), 0), "layout": {"tp": 2}}])


def test_plain_model_has_no_layout() -> None:
    model = torch.nn.Linear(3, 2)
    assert layout_of([model], torch.optim.Adam(model.parameters()), 1, 1) is None
