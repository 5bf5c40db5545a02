"""Which layouts a command line of Megatron-LM can be restarted in, beside the one that its flags give.

Rules
-----
* Nothing is said against the flags' own layout, which is Megatron's affair, but that the sequence must divide among cp
  workers: Megatron would say so in every worker; and that no stage may lack experts where those of others are spread
  and Megatron's checkpoints have the sharded optimizer: it would fail in the first of them.
* Another must divide what Megatron divides. The vocabulary is padded as for the flags' own tp, so that the model is the
  same in every layout (`agents/trainer/megatron/flags.py`), and must divide as it was padded.
* What cuts the stages by hand binds pp and vpp, what needs a certain tp or cp binds that. Nobody has tried to cut some
  kinds of models and states anew (`untried`): a person may ask for it, `auto` does not.
* A stage's layers divide among its vpp chunks; Megatron interleaves from two stages on, without overlap of their
  communication from three. Experts divide over ep workers, and each is cut in etp parts there. A sequence divides among
  cp workers, each of which takes two pieces of it.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unicrond.events.megatron.command_line import (
    BadFlags,
    CommandLine,
    degrees,
    saves_sharded,
    unsummed_copies,
)
from unicrond.events.vocabulary.shape import Shape

#: The script whose states have been cut anew.
_TRIED_SCRIPT = "pretrain_gpt.py"
_BIND_TP = ("--tp-comm-overlap", "--distribute-saved-activations")
_BIND_CP = ("--hierarchical-context-parallel-sizes",)
_BIND_PP = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--decoupled-lr",
    "--defer-embedding-wgrad-compute",
    "--mtp-num-layers",
    "--pipeline-model-parallel-layout",
    "--pipeline-model-parallel-split-rank",
    "--standalone-embedding-stage",
)
#: Formats of Megatron's own checkpoints that one layout has written and no other can read.
_RIGID_FORMATS = ("torch", "torch_dcp", "zarr")
_ANY_LAYOUT = "torch_dist"
#: In `--moe-layer-freq`, where layers without experts are `d`, those with some `e`.
_LIST, _TIMES = re.compile(r"\[([01](?:,[01])*)\]"), re.compile(r"([de]+)\*(\d{1,6})(?!\d)")
_PLUS, _PARENTHESES = re.compile(r"(?<=[de])\+(?=[de]+(?![de*]))"), re.compile(r"\(([de]+)\)")
#: A longer pattern is not read.
_PATTERN_MAX = 4096
_UNTRIED = (
    "--cp-comm-type",
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
    """The layouts that one command line allows.

    `flags_layout`: the layout that its flags give. `divided_by_tp`: sizes, by the words that name them;
    `experts_divided`: those that tp / ep must divide. `pattern`: of all layers, as `_pattern` has it, where each stage
    needs experts. `layers`, `experts`: how many; 1 expert where a layer has none.
    `seq`: tokens of a sample. `fewest_stages`: with which Megatron interleaves. `bars_ep`: what rules out ep above 1,
    and parts of experts.
    `binding_tp`, `binding_cp`, `binding_pp`: flags with which tp, cp, or pp and vpp, stay as they are. `rigid`: why the
    whole layout stays. `untried`: why `auto` chooses no other, "" where it may.
    """

    flags_layout: Shape
    divided_by_tp: tuple[tuple[str, int], ...]
    experts_divided: tuple[tuple[str, int], ...]
    pattern: str
    layers: int
    fewest_stages: int
    bars_ep: str
    binding_tp: tuple[str, ...]
    binding_cp: tuple[str, ...]
    binding_pp: tuple[str, ...]
    needs_sequence_parallel: bool
    sequence_parallel: bool
    rigid: str
    untried: str
    experts: int
    seq: int

    def problem(self, shape: Shape) -> str:
        """Say in one line why the task cannot be restarted in this layout, with the flag; "" where no reason is
        known."""
        return next(self._problems(shape), "")

    def _problems(self, shape: Shape) -> Iterator[str]:
        tp, pp, vpp, *_ = shape
        flags_layout = self.flags_layout
        tp_pieces = tp if self.sequence_parallel and shape != flags_layout else 1
        if shape.cp > 1 and self.seq % (pieces := 2 * shape.cp * tp_pieces):
            yield f"--seq-length: {self.seq} does not divide in {pieces} pieces for cp ({shape.cp}); use another cp"
        if self._has_stage_without_experts(shape):
            yield stage_without_experts(pp, shape.ep)
        if shape == flags_layout:
            return
        if self.rigid:
            yield f"{self.rigid}; keep {flags_layout}"
        bindings = {"tp": self.binding_tp, "cp": self.binding_cp, "pp": self.binding_pp, "vpp": self.binding_pp}
        for name, binding in bindings.items():
            if binding and getattr(shape, name) != (flags_degree := getattr(flags_layout, name)):
                yield f"{binding[0]}: binds {name} to {flags_degree}; keep that"
        if tp > 1 and self.needs_sequence_parallel:
            yield "--num-experts: with tp above 1 they need --sequence-parallel; add it, or use tp 1"
        for flag, size in self.divided_by_tp:
            if size % tp:
                yield f"{flag}: {size} does not divide among tp ({tp}); use another tp"
        if self.layers % pp:
            yield f"--num-layers: {self.layers} does not divide among pp ({pp}); use another pp"
        if vpp > 1:
            yield from self._uninterleaved(pp, vpp)
        yield from self._experts_apart(shape)

    def _has_stage_without_experts(self, shape: Shape) -> bool:
        if shape.ep == 1 or self.binding_pp or self.layers % (shape.pp * shape.vpp) or "e" not in self.pattern:
            return False
        size = self.layers // shape.pp // shape.vpp  # chunk by chunk, a layer of each stage in turn
        chunks = [self.pattern[n : n + size] for n in range(0, len(self.pattern), size)]
        return any("e" not in "".join(chunks[stage :: shape.pp]) for stage in range(shape.pp))

    def _uninterleaved(self, pp: int, vpp: int) -> Iterator[str]:
        if pp < self.fewest_stages:
            yield f"vpp: {vpp} chunks of a stage are interleaved from pp {self.fewest_stages} on; use vpp 1"
        if self.layers // pp % vpp:
            yield f"--num-layers: {self.layers // pp} of a stage do not divide among vpp ({vpp}); use another vpp"

    def _experts_apart(self, shape: Shape) -> Iterator[str]:
        ep, parts = shape.ep, shape.expert_tp
        if ep > 1 and self.bars_ep:
            yield f"{self.bars_ep}; use ep 1"
        if self.bars_ep and shape.etp not in (0, self.flags_layout.etp):
            yield f"{self.bars_ep}; leave etp out"
        if self.experts > 1 and (problem := unsummed_copies(shape)):
            yield f"etp: {problem}"
        if self.experts % ep:
            yield f"--num-experts: {self.experts} do not divide among ep ({ep}); use another ep"
        name = "etp" if shape.etp else "tp / ep"
        for flag, size in self.experts_divided:
            if size % parts:
                yield f"{flag}: {size} does not divide among {name} ({parts}); use another tp or ep"


def layout_rules(args: Sequence[str]) -> LayoutRules | None:
    """Return the rules of the script and flags; None where they cannot be read (other code refuses those)."""
    return _cached_rules(tuple(args))


@lru_cache(maxsize=256)
def _cached_rules(args: tuple[str, ...]) -> LayoutRules | None:
    try:
        return _read(CommandLine.parse(args))
    except BadFlags:
        return None


def _read(line: CommandLine) -> LayoutRules:
    layout = degrees(line)
    experts = line.number("--num-experts", default=1)
    rigid = ""
    if (
        "--load" in line.flags
        and (checkpoint_format := line.text("--ckpt-format", default=_ANY_LAYOUT)) in _RIGID_FORMATS
    ):
        rigid = f"--ckpt-format: checkpoints of {checkpoint_format} are read in the layout that wrote them alone"
    return LayoutRules(
        flags_layout=layout,
        divided_by_tp=tuple(_divided_by_tp(line, layout.tp)),
        experts_divided=tuple(_sizes(line, ("--moe-ffn-hidden-size",))) if experts > 1 else (),
        pattern=_pattern(line) if experts > 1 and saves_sharded(line.flags) else "",
        layers=line.number("--num-layers", "--encoder-num-layers"),
        fewest_stages=3 if "--no-overlap-p2p-communication" in line.flags else 2,
        bars_ep=_ep_bar(line),
        binding_tp=tuple(flag for flag in _BIND_TP if flag in line.flags),
        binding_cp=tuple(flag for flag in _BIND_CP if flag in line.flags),
        binding_pp=tuple(flag for flag in _BIND_PP if flag in line.flags),
        needs_sequence_parallel="--num-experts" in line.flags and "--sequence-parallel" not in line.flags,
        sequence_parallel="--sequence-parallel" in line.flags,
        rigid=rigid,
        untried=_untried(line),
        experts=experts,
        seq=line.number("--seq-length", "--encoder-seq-length"),
    )


def stage_without_experts(pp: int, ep: int) -> str:
    """Say in one line what is wrong with a pipeline stage that has none of the experts, which are over `ep` workers."""
    return (
        f"--pipeline-model-parallel-size: {pp} leaves a stage without experts: with ep {ep} and"
        " --use-distributed-optimizer Megatron has no checkpoints of that; use another, or leave out --save and --load"
    )


def _pattern(line: CommandLine) -> str:
    """Return what the layers are, `e` with experts and `d` without, as Megatron evaluates `--moe-layer-freq`; "" where
    that is more than lists of 0 and 1, sums and multiples."""
    layers = line.number("--num-layers", "--encoder-num-layers")
    text = line.text("--moe-layer-freq", default="1").replace(" ", "")
    if max(layers, len(text)) > _PATTERN_MAX:
        return ""
    if text.isdecimal():
        return "".join("d" if n % max(int(text), 1) else "e" for n in range(layers))
    text, before = _LIST.sub(lambda match: match[1].translate({44: "", 48: "d", 49: "e"}), text), ""
    while before != text:
        before = text
        text = _TIMES.sub(lambda match: match[1] * min(int(match[2]), layers + 1), text)
        text = _PARENTHESES.sub(r"\1", _PLUS.sub("", text)) if len(text) <= _PATTERN_MAX else ""
    return text if len(text) == layers and not text.strip("de") else ""


def _divided_by_tp(line: CommandLine, tp: int) -> Iterator[tuple[str, int]]:
    """Yield the sizes that tp must divide, by flag."""
    hidden_size = line.number("--hidden-size")
    yield "--num-attention-heads", line.number("--num-attention-heads")
    if "--group-query-attention" in line.flags:
        yield "--num-query-groups", line.number("--num-query-groups", default=1)
    yield "--hidden-size", hidden_size
    yield from _sizes(line, ("--ffn-hidden-size", "--moe-shared-expert-intermediate-size"))
    yield "--make-vocab-size-divisible-by", line.number("--make-vocab-size-divisible-by", default=128) * tp
    if "--sequence-parallel" in line.flags:
        yield "--seq-length", line.number("--seq-length", "--encoder-seq-length")


def _sizes(line: CommandLine, flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the flags that are given."""
    yield from ((flag, line.number(flag)) for flag in flags if flag in line.flags)


def _ep_bar(line: CommandLine) -> str:
    """Say why no experts can be on workers of their own; "" where they can."""
    return "" if "--num-experts" in line.flags else "--num-experts: is not given"


def _untried(line: CommandLine) -> str:
    """Say why nobody has tried another layout of this command line; "" where somebody has."""
    if line.script.rpartition("/")[2] != _TRIED_SCRIPT:
        return f"args: of {line.script} nobody has tried another layout"
    if "--load" in line.flags and line.text("--ckpt-format") != _ANY_LAYOUT:
        # Megatron's default, but an older checkpoint would be read all the same, in its own layout alone.
        return f"args: --load: can be read in another layout with --ckpt-format {_ANY_LAYOUT} alone, which is not given"
    if (layout := degrees(line)).cp > 1:
        return f"args: --context-parallel-size: {layout.cp}: nobody has tried it in another layout"
    if layout.data > 1:
        return f"args: --expert-model-parallel-size: {layout.ep}: nobody has tried it in another layout"
    flag = next((flag for flag in _UNTRIED if flag in line.flags), "")
    return f"args: {flag}: nobody has tried it in another layout" if flag else ""
