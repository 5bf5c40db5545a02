"""Which tp and pp a command line of Megatron-LM can be restarted in, beside the ones that its flags give.

Rules
-----
* Nothing is said against the flags' own layout: that is Megatron's affair.
* Another must divide what Megatron divides. The vocabulary is padded as for the flags' own tp, so that the model is the
  same in every layout (`agents/trainer/megatron/flags.py`), and must divide as it was padded.
* What cuts the stages by hand binds pp, what needs a certain tp binds that. Of some kinds of models and states nobody
  has tried whether they can be cut anew: a person may ask for that, `auto` does not (`untried`).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from events.megatron_lm import BadFlags, CommandLine

#: The script whose states have been cut anew.
_TRIED_SCRIPT = "pretrain_gpt.py"
_BIND_TP = ("--tp-comm-overlap", "--expert-tensor-parallel-size", "--distribute-saved-activations")
_BIND_PP = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--decoupled-lr",
    "--defer-embedding-wgrad-compute",
    "--mtp-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
    "--pipeline-model-parallel-split-rank",
    "--standalone-embedding-stage",
)
#: Formats of Megatron's own checkpoints that one layout has written and no other can read.
_RIGID_FORMATS = ("torch", "torch_dcp", "zarr")
_ANY_LAYOUT = "torch_dist"
_UNTRIED = (
    "--experimental-attention-variant",
    "--fp4-format",
    "--fp8-format",
    "--heterogeneous-layers-config-encoded-json",
    "--heterogeneous-layers-config-path",
    "--hybrid-attention-ratio",
    "--hybrid-layer-pattern",
    "--hybrid-mlp-ratio",
    "--hybrid-override-pattern",
    "--is-hybrid-model",
    "--moe-grouped-gemm",
    "--moe-use-legacy-grouped-gemm",
    "--multi-latent-attention",
    "--optimizer-cpu-offload",
    "--pretrained-checkpoint",
    "--retro-add-retriever",
    "--spec",
    "--use-legacy-models",
    "--use-precision-aware-optimizer",
)


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """What one command line says. `divided_by_tp`, `divided_by_pp`: sizes, by the words that name them. `binding_tp`,
    `binding_pp`: flags with which tp or pp stays as it is. `untried`: why `auto` chooses no other, "" where it may.
    `experts`: of a layer of experts, 1 without."""

    tp: int
    pp: int
    divided_by_tp: tuple[tuple[str, int], ...]
    divided_by_pp: tuple[tuple[str, int], ...]
    binding_tp: tuple[str, ...]
    binding_pp: tuple[str, ...]
    needs_sequence_parallel: bool
    rigid: str
    untried: str
    experts: int

    def problem(self, tp: int, pp: int) -> str:
        """Why it cannot be restarted so, as one line that names the flag; "" where nothing is known against it."""
        return next(self._problems(tp, pp), "")

    def _problems(self, tp: int, pp: int) -> Iterator[str]:
        if (tp, pp) == (self.tp, self.pp):
            return
        if self.rigid:
            yield f"{self.rigid}; keep tp {self.tp}, pp {self.pp}"
        for name, now, own, binding in (("tp", tp, self.tp, self.binding_tp), ("pp", pp, self.pp, self.binding_pp)):
            if now != own and binding:
                yield f"{binding[0]}: binds {name} to {own}; keep that"
        if tp > 1 and self.needs_sequence_parallel:
            yield "--num-experts: with tp above 1 they need --sequence-parallel; add it, or use tp 1"
        for name, now, sizes in (("tp", tp, self.divided_by_tp), ("pp", pp, self.divided_by_pp)):
            for flag, size in sizes:
                if size % now:
                    yield f"{flag}: {size} does not divide among {name} ({now}); use another {name}"


def of_args(args: Sequence[str]) -> LayoutRules | None:
    """The rules of the script and flags; None where they cannot be read (which others refuse)."""
    return _of_args(tuple(args))


@lru_cache(maxsize=256)
def _of_args(args: tuple[str, ...]) -> LayoutRules | None:
    try:
        return _read(CommandLine.of(args))
    except BadFlags:
        return None


def _read(line: CommandLine) -> LayoutRules:
    tp = line.number("--tensor-model-parallel-size", default=1)
    experts = line.number("--num-experts", default=1)
    rigid = ""
    if "--load" in line.flags and (form := line.text("--ckpt-format", default=_ANY_LAYOUT)) in _RIGID_FORMATS:
        rigid = f"--ckpt-format: checkpoints of {form} are read in the layout that wrote them alone"
    return LayoutRules(
        tp=tp,
        pp=line.number("--pipeline-model-parallel-size", default=1),
        divided_by_tp=tuple(_divided_by_tp(line, tp)),
        divided_by_pp=(("--num-layers", line.number("--num-layers", "--encoder-num-layers")),),
        binding_tp=tuple(flag for flag in _BIND_TP if flag in line.flags),
        binding_pp=tuple(flag for flag in _BIND_PP if flag in line.flags),
        needs_sequence_parallel="--num-experts" in line.flags and "--sequence-parallel" not in line.flags,
        rigid=rigid,
        untried=_untried(line),
        experts=experts,
    )


def _divided_by_tp(line: CommandLine, tp: int) -> Iterator[tuple[str, int]]:
    hidden = line.number("--hidden-size")
    yield "--num-attention-heads", line.number("--num-attention-heads")
    if "--group-query-attention" in line.flags:
        yield "--num-query-groups", line.number("--num-query-groups", default=1)
    yield "--hidden-size", hidden
    for flag in ("--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        if flag in line.flags:
            yield flag, line.number(flag)
    yield "--make-vocab-size-divisible-by", line.number("--make-vocab-size-divisible-by", default=128) * tp
    if "--sequence-parallel" in line.flags:
        yield "--seq-length", line.number("--seq-length", "--encoder-seq-length")


def _untried(line: CommandLine) -> str:
    if line.script.rpartition("/")[2] != _TRIED_SCRIPT:
        return f"args: of {line.script} nobody has tried another layout"
    if "--load" in line.flags and line.text("--ckpt-format") != _ANY_LAYOUT:
        # Megatron's default, but an older checkpoint would be read all the same, in its own layout alone.
        return f"args: --load: can be read in another layout with --ckpt-format {_ANY_LAYOUT} alone, which is not given"
    flag = next((flag for flag in _UNTRIED if flag in line.flags), "")
    return f"args: {flag}: nobody has tried it in another layout" if flag else ""
