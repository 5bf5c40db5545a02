"""What a command line of Megatron-LM says about a task: read on the head, without a checkout, and on every worker.

Rules
-----
* A flag's values are all words up to the next one that begins with `--`; of a flag that stands twice the last counts.
  Megatron abbreviates no flags.
* What a task needs to know must stand in the flags: what Megatron would fill in from the number of processes (the
  global batch) or from a checkpoint (sizes) is asked for.
* What would silently give other results than Megatron alone is refused, by one line that names the flag. The worker
  asks the same table again, with the values that Megatron has parsed.

Pure. How the flags become a task file: `unicrond/intake/megatron_task.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unicrond.events.vocabulary.shape import Shape

#: `entry` of a task file.
ENTRY = "megatron-lm"
#: Releases of Megatron-core with which the trainer's tests are run (docs/use/versions.md), oldest first.
TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


class BadFlags(ValueError):
    """The command line cannot be a task. The message is one line that names the flag."""


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A flag that is refused, for `reason` (one line), unless its value is one of `harmless`, false or not given."""

    flag: str
    reason: str
    harmless: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the parsed argument."""
        return self.flag.removeprefix("--").replace("-", "_")

    def refuses(self, value: object) -> bool:
        """Say whether the value of a parsed argument, or a flag's words, is refused."""
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if len(value) == 1 else tuple(value)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        return value not in (None, False, (), 0, "", *self.harmless)


_BUILT_IN = "unicrond does this itself"
_UNDONE = "not supported yet"
_OTHER_SIZES = "iterations of different sizes are not supported yet; use a constant --global-batch-size"
#: Read from the top: the first that holds is told.
REFUSED_FLAGS: tuple[RefusedFlag, ...] = (
    RefusedFlag("--yaml-cfg", "give the flags themselves: the task is read from them"),
    RefusedFlag("--use-torch-fsdp2", "FSDP shards what a replica must hold whole; use --use-distributed-optimizer"),
    RefusedFlag("--use-megatron-fsdp", "FSDP shards what a replica must hold whole; use --use-distributed-optimizer"),
    RefusedFlag("--hybrid-context-parallel", f"sequences over various numbers of workers are {_UNDONE}"),
    RefusedFlag("--rampup-batch-size", _OTHER_SIZES),
    RefusedFlag("--decrease-batch-size-if-needed", _OTHER_SIZES),
    RefusedFlag("--iterations-to-skip", f"skipped iterations are {_UNDONE}; leave it out"),
    RefusedFlag("--phase-transition-iterations", f"phases are {_UNDONE}; submit one task for each"),
    RefusedFlag("--moe-use-upcycling", "convert the checkpoint first, outside of a task"),
    RefusedFlag("--ckpt-convert-format", "convert the checkpoint first, outside of a task"),
    RefusedFlag("--skip-train", "a task trains; evaluate outside of one"),
    RefusedFlag("--perform-rl-step", f"reinforcement learning is {_UNDONE}"),
    RefusedFlag("--qk-clip", "its largest logits would be those of one replica's micro-batches"),
    RefusedFlag("--cuda-graph-impl", f"CUDA graphs are {_UNDONE}: gradients go to memory that changes", ("none",)),
    RefusedFlag("--enable-cuda-graph", f"CUDA graphs are {_UNDONE}: gradients go to memory that changes"),
    RefusedFlag("--external-cuda-graph", f"CUDA graphs are {_UNDONE}: gradients go to memory that changes"),
    RefusedFlag("--delay-wgrad-compute", f"weight gradients outside of the backward are {_UNDONE}"),
    RefusedFlag("--use-nccl-ub", f"registered buffers are {_UNDONE}: gradients go to memory that changes"),
    RefusedFlag("--nccl-ub", f"registered buffers are {_UNDONE}: gradients go to memory that changes"),
    RefusedFlag("--reuse-grad-buf-for-mxfp8-param-ag", f"{_UNDONE}: gradients and parameters must not share memory"),
    RefusedFlag("--fp4-param-gather", f"fp4 parameters are {_UNDONE}"),
    RefusedFlag("--save-wgrads-interval", f"{_UNDONE}; leave it out"),
    RefusedFlag("--save-dgrads-interval", f"{_UNDONE}; leave it out"),
    RefusedFlag("--enable-ft-package", f"{_BUILT_IN}: faults are found and healed"),
    RefusedFlag("--inprocess-restart", f"{_BUILT_IN}: faults are found and healed"),
    RefusedFlag("--adlr-autoresume", f"{_BUILT_IN}: faults are found and healed"),
    RefusedFlag("--dataloader-type", "unicrond deals micro-batches by Megatron's own samplers: single or cyclic",
            ("single", "cyclic")),
    RefusedFlag("--non-persistent-ckpt-type", f"{_BUILT_IN}: nodes keep states in memory", ("global",)),
    RefusedFlag("--vision-pretraining", f"vision models are {_UNDONE}"),
    RefusedFlag("--dsa-indexer-loss-coeff", f"a loss that Megatron scales by other rules is {_UNDONE}; leave it out"),
    RefusedFlag("--optimizer", "adam or sgd; others gather gradients themselves", ("adam", "sgd")),
)  # fmt: skip
MOE_OVERLAP = "--overlap-moe-expert-parallel-comm"
#: Unset in every worker, with a line: they would save time or memory, and training without them is right.
WITHOUT_EFFECT: tuple[RefusedFlag, ...] = (
    RefusedFlag("--num-distributed-optimizer-instances", "unicrond shards the optimizer over all replicas", (1,)),
    RefusedFlag("--overlap-param-gather-with-optimizer-step", "unicrond shards the optimizer over all replicas"),
    RefusedFlag(MOE_OVERLAP, f"its schedule is {_UNDONE}; the plain one computes the same, in more time"),
    RefusedFlag("--ep-overlap-early-attn-memory-release", f"it is a part of {MOE_OVERLAP}"),
    RefusedFlag("--fp8-param-gather", "parameters stay in bf16, from which each forward casts them, in more memory"),
)
_GLOBAL_AUX_LOSS = RefusedFlag(
    "--moe-router-load-balancing-type", "global_aux_loss depends on the order of micro-batches; use aux_loss"
)
_NO_EXPERTS = RefusedFlag(
    "--expert-model-parallel-size", "there are no experts to spread; give --num-experts, or leave it out", (1,)
)
#: With `SHARDED`, in whose place unicrond's own optimizer stands. The format: where checkpoints are asked for.
SHARDED = "--use-distributed-optimizer"
_UNSHARDED = (RefusedFlag("--fp16", ""), RefusedFlag("--optimizer", "", ("adam",)))
_UNSHARDED_FORMAT = RefusedFlag("--ckpt-format", f"with {SHARDED} torch_dist only", ("torch_dist",))
_CHECKPOINTS = ("--save", "--load")
#: What `refusals` asks for beside the flags of the table.
CHECKED_FLAGS = (
    _GLOBAL_AUX_LOSS.flag, _NO_EXPERTS.flag, "--num-experts", SHARDED, "--fp16", _UNSHARDED_FORMAT.flag, *_CHECKPOINTS,
)  # fmt: skip


def refusals(values: Mapping[str, object]) -> Iterator[str]:
    """Yield what is refused, one line each. `values`: by flag name (`--x-y`), words or parsed."""
    for refusal in REFUSED_FLAGS:
        if refusal.refuses(values.get(refusal.flag)):
            yield f"{refusal.flag}: {refusal.reason}"
    if "global_aux_loss" in str(values.get(_GLOBAL_AUX_LOSS.flag, "")):
        yield f"{_GLOBAL_AUX_LOSS.flag}: {_GLOBAL_AUX_LOSS.reason}"
    if _NO_EXPERTS.refuses(values.get(_NO_EXPERTS.flag)) and not values.get("--num-experts"):
        yield f"{_NO_EXPERTS.flag}: {_NO_EXPERTS.reason}"
    if values.get(SHARDED):
        if any(refusal.refuses(values.get(refusal.flag)) for refusal in _UNSHARDED):
            yield f"{SHARDED}: Adam in fp32 or bf16 only; leave it out"
        if saves_sharded(values) and _UNSHARDED_FORMAT.refuses(values.get(_UNSHARDED_FORMAT.flag)):
            yield f"{_UNSHARDED_FORMAT.flag}: {_UNSHARDED_FORMAT.reason}"


def saves_sharded(values: Mapping[str, object]) -> bool:
    """Say whether Megatron's own checkpoints are asked for, and have the sharded optimizer. `values`: by flag name,
    words (none, too) or parsed."""
    flags = {flag for flag in (SHARDED, *_CHECKPOINTS) if values.get(flag) not in (None, False)}
    return SHARDED in flags and len(flags) > 1


def without_effect(values: Mapping[str, object]) -> Iterator[tuple[RefusedFlag, str]]:
    """Yield each flag that is unset, and the line that says so. `values`: as of `refusals`."""
    for flag in WITHOUT_EFFECT:
        if flag.refuses(values.get(flag.flag)):
            yield flag, f"{flag.flag} is without effect: {flag.reason}"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A parsed command line: `script`, and the words of each of its flags, by name (`--x-y`)."""

    script: str
    flags: Mapping[str, tuple[str, ...]]

    @staticmethod
    def parse(args: Sequence[str]) -> CommandLine:
        """Parse the words. Raises BadFlags without a script, or where a word belongs to no flag."""
        if not args or args[0].startswith("-"):
            raise BadFlags("the first of args must be the script, for example pretrain_gpt.py")
        flags: dict[str, list[str]] = {}
        name = ""
        for word in args[1:]:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                flags[name] = [value] if equals else []
            elif not name:
                raise BadFlags(f"{word!r} stands before the first flag; give flags only behind the script")
            else:
                flags[name].append(word)
        return CommandLine(args[0], {name: tuple(words) for name, words in flags.items()})

    @property
    def values(self) -> dict[str, object]:
        """Return each flag's words; of a flag without any, True."""
        return {name: words or True for name, words in self.flags.items()}

    def text(self, *names: str, default: str = "") -> str:
        """Return the words of the first of these flags that is given."""
        return next((" ".join(self.flags[name]) for name in names if name in self.flags), default)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return a flag's number. Raises BadFlags where it is not given and has no default, or is not a whole number
        above 0."""
        text = self.text(*names)
        if not text and default is not None:
            return default
        if not text:
            raise BadFlags(f"{names[0]}: is not given; unicrond needs to know it")
        try:
            value = int(text)
        except ValueError:
            value = 0
        if value < 1:
            raise BadFlags(f"{names[0]}: {text!r} is not a whole number above 0")
        return value


#: How many layers a chunk of a stage has, how many chunks a stage has, or what each chunk of all stages has: Megatron
#: takes one of them.
CHUNKS_FLAGS = (
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)  # fmt: skip
#: In a pipeline layout: `(..)*n`, and `|` or `|*n`.
_REPEATED, _BAR = re.compile(r"\(([^)]+)\)\*(\d{1,6})"), re.compile(r"\|(?:\*(\d{1,6}))?")
_COUNT_AS_LAYERS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
#: The schedule is the flags', not the state's.
_OVERRIDE, _NOT_OVERRIDE = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"


def with_flags(args: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command line with other values for these flags, for training that continues with them."""
    remaining: list[str] = []
    skips = False
    for word in args:
        if word.startswith("--"):
            skips = word.partition("=")[0] in (*values, _OVERRIDE, _NOT_OVERRIDE)
        if not skips:
            remaining.append(word)
    return (*remaining, *(word for flag in values.items() for word in flag), _OVERRIDE)


@dataclass(frozen=True, slots=True)
class TrainingFlags:
    """A task, as its command line describes it. `dropout`: of hidden states. `notes`: what a person should know."""

    tp: int
    pp: int
    vpp: int
    ep: int
    cp: int
    etp: int
    global_batch: int
    micro_batch: int
    iterations: int
    seed: int
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    dropout: float
    distributed: bool
    notes: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        """Return the layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, cp=self.cp, etp=self.etp)


def read_training_flags(line: CommandLine) -> TrainingFlags:
    """Read the task that the command line describes. Raises BadFlags for what is refused, missing or no number."""
    for reason in refusals(line.values):
        raise BadFlags(reason)
    cut = degrees(line)
    if "--num-experts" in line.flags and (problem := unsummed_copies(cut)):
        raise BadFlags(f"--expert-tensor-parallel-size: {problem}")
    if (experts := line.number("--num-experts", default=0)) % cut.ep:
        raise BadFlags(f"--expert-model-parallel-size: {cut.ep} does not divide {experts} experts; use another")
    global_batch = _global_batch(line)
    return TrainingFlags(
        tp=cut.tp,
        pp=cut.pp,
        vpp=cut.vpp,
        ep=cut.ep,
        cp=cut.cp,
        etp=cut.etp,
        global_batch=global_batch,
        micro_batch=line.number("--micro-batch-size"),
        iterations=_iterations(line, global_batch),
        seed=line.number("--seed", default=1234),
        layers=line.number("--num-layers", "--encoder-num-layers"),
        hidden=line.number("--hidden-size"),
        heads=line.number("--num-attention-heads"),
        seq=line.number("--seq-length", "--encoder-seq-length"),
        vocab=_vocabulary(line, cut.tp),
        dropout=_dropout(line),
        distributed=SHARDED in line.flags,
        notes=tuple(_notes(line)),
    )


def unsummed_copies(shape: Shape) -> str:
    """Say how copies of an expert would drift apart, and what to do; "" where Megatron sums them. With ep 1 it sums
    experts over the ranks over which it sums all else, however it has cut them."""
    if shape.ep > 1 or shape.expert_tp == shape.tp:
        return ""
    return f"{shape.expert_tp} is not tp ({shape.tp}): with ep 1 Megatron sums no copies of an expert; leave it out"


def degrees(line: CommandLine) -> Shape:
    """Return the layout that the flags give. Raises BadFlags."""
    tp = line.number("--tensor-model-parallel-size", default=1)
    pp = line.number("--pipeline-model-parallel-size", default=1)
    vpp = line.number(CHUNKS_FLAGS[1], default=1)
    if layout := line.text(CHUNKS_FLAGS[2]):
        if (chunks := chunks_of(layout)) % pp:
            raise BadFlags(f"{CHUNKS_FLAGS[2]}: its {chunks} stages do not divide among pp {pp}; use a multiple of pp")
        vpp = chunks // pp
    if (layers_per_chunk := line.number(CHUNKS_FLAGS[0], default=0)) > 0:
        layers = line.number("--num-layers", "--encoder-num-layers")
        layers += sum(flag in line.flags for flag in _COUNT_AS_LAYERS)
        if layers % (pp * layers_per_chunk):
            raise BadFlags(
                f"{CHUNKS_FLAGS[0]}: {layers} layers do not divide among pp {pp} in chunks of {layers_per_chunk}"
            )
        vpp = layers // pp // layers_per_chunk
    ep, cp = (line.number(f"--{name}-parallel-size", default=1) for name in ("expert-model", "context"))
    etp = line.number("--expert-tensor-parallel-size", default=tp)
    return Shape(tp, pp, vpp, ep, cp=cp, etp=etp).plain


def chunks_of(layout: str) -> int:
    """Return how many chunks of all stages a pipeline layout such as `Et*2|(tt|)*3,L` has, as Megatron unrolls it."""
    # What stands outside of repeated parts, what such a part has, how often; and so on.
    pieces = _REPEATED.split(layout.replace(",", ""))
    repeated = zip(pieces[1::3], pieces[2::3], strict=True)
    return 1 + sum(map(_bars, pieces[::3])) + sum(_bars(part) * int(count) for part, count in repeated)


def _bars(text: str) -> int:
    return sum(int(count or 1) for count in _BAR.findall(text))


def _global_batch(line: CommandLine) -> int:
    if "--global-batch-size" not in line.flags:
        raise BadFlags("--global-batch-size: is not given; without it the batch would grow with every replica")
    return line.number("--global-batch-size")


def _iterations(line: CommandLine, global_batch: int) -> int:
    if "--train-samples" not in line.flags:
        return line.number("--train-iters")
    iterations = line.number("--train-samples") // global_batch
    if not iterations:
        raise BadFlags(f"--train-samples: fewer than one global batch of {global_batch}")
    return iterations


def _vocabulary(line: CommandLine, tp: int) -> int:
    """Return the vocabulary's size as Megatron pads it; GPT-2's where only the tokenizer's files on the nodes know."""
    size = line.number("--vocab-size", default=50257)
    if line.text("--tokenizer-type") == "NullTokenizer":
        size += 1
    multiple = prod((line.number("--make-vocab-size-divisible-by", default=128), tp))
    return -(-size // multiple) * multiple


def _dropout(line: CommandLine) -> float:
    text = line.text("--hidden-dropout", default="0.1")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise BadFlags(f"--hidden-dropout: {text!r} is not a number from 0 to below 1")
    return value


def _notes(line: CommandLine) -> Iterator[str]:
    """Yield what a person should know about the task."""
    yield from (text for _, text in without_effect(line.values))
    if SHARDED in line.flags:
        yield "the optimizer's state is shared over the replicas by unicrond, not by Megatron's DistributedOptimizer"
    if "--vocab-size" not in line.flags:
        yield "the vocabulary is counted as 50257: only the tokenizer on the nodes knows it (used to count FLOP)"
    if line.flags.keys() & {"--num-experts", "--ffn-hidden-size", "--swiglu"}:
        yield "FLOP are counted for a plain GPT of these sizes; give throughput or weight if tasks are to be compared"
    save = line.text("--save")
    if save:
        every = line.text("--save-interval", default="never but at the end")
        yield f"the lead replica writes Megatron's checkpoints to {save} (every: {every}); unicrond keeps its own"
    if "--load" in line.flags:
        yield f"training begins from the checkpoint in {line.text('--load')}, unless unicrond has a later state"
