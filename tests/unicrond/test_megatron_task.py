"""`entry: megatron-lm` in task files: what the flags say, what is refused. No checkout is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from unicrond.core.nodes.gpu_types import spec_on
from unicrond.core.tasks.reshaping import is_in_place
from unicrond.core.tasks.reshaping import layouts_of as layouts_of_task
from unicrond.core.tasks.task_rules import nearest, spec_faults
from unicrond.ctl.main import main
from unicrond.events.megatron.command_line import SHARDED, BadFlags, CommandLine, read_training_flags
from unicrond.events.vocabulary import LayoutSpec, ReshapeRequested, TaskSpec
from unicrond.events.vocabulary.shape import Shape
from unicrond.intake.task_file import TaskFileError, load, loads

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2"
    " --global-batch-size 16 --train-iters 500 --tensor-model-parallel-size 2 --pipeline-model-parallel-size=2"
    " --seed 7 --hidden-dropout 0.0 --vocab-size 32000 --lr 1e-4 --bf16"
)


def task(flags: str = FLAGS, **fields: object) -> str:
    words = ", ".join(f"'{word}'" for word in ["pretrain_gpt.py", *flags.split()])
    more = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return f"name: lm\nentry: megatron-lm\ncwd: /opt/Megatron-LM\nargs: [{words}]\n{more}"


def test_megatron_flags_define_task() -> None:
    spec = loads(task(min_workers=4, max_workers=32))
    assert (spec.tp, spec.pp, spec.global_batch, spec.micro_batch, spec.iterations, spec.seed) == (2, 2, 16, 2, 500, 7)
    model = spec.model
    assert (model.layers, model.hidden, model.heads, model.seq, model.vocab) == (4, 128, 8, 256, 32000)
    assert spec.entry == "megatron-lm" and spec.cwd == "/opt/Megatron-LM"
    assert spec.lanes == 8  # as many as there may be replicas
    assert not spec.optimizer.distributed
    assert loads(task(FLAGS + " --use-distributed-optimizer", min_workers=4, max_workers=4)).optimizer.distributed


def test_megatron_samples_and_vocabulary_match_megatron() -> None:
    flags = FLAGS.replace("--train-iters 500", "--train-samples 1000").replace(
        "32000", "255 --tokenizer-type NullTokenizer"
    )
    told = read_training_flags(CommandLine.parse(["x.py", *flags.split()]))
    assert told.iterations == 62
    assert told.vocab == 256


def test_given_pipeline_layout_says_how_many_chunks_a_stage_has() -> None:
    for layout, vpp in (("Et|tttL", 1), ("E(t|)*3tL", 2)):
        spec = loads(task(f"{FLAGS} --pipeline-model-parallel-layout {layout}", min_workers=4, max_workers=4))
        assert spec.shape == Shape(2, 2, vpp=vpp)


def test_megatron_takes_last_of_repeated_flags() -> None:
    told = read_training_flags(CommandLine.parse(["x.py", *FLAGS.split(), "--micro-batch-size", "4"]))
    assert told.micro_batch == 4


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (FLAGS.replace("--global-batch-size 16", ""), "--global-batch-size: is not given; without it the batch"),
        (FLAGS.replace("--micro-batch-size 2", ""), "--micro-batch-size: is not given"),
        (FLAGS.replace("--num-layers 4", "--num-layers four"), "--num-layers: 'four' is not a whole number above 0"),
        (FLAGS + " --rampup-batch-size 2 2 100", "--rampup-batch-size: iterations of different sizes"),
        (FLAGS + " --hybrid-context-parallel", "--hybrid-context-parallel: sequences over various numbers of workers"),
        (FLAGS + " --use-megatron-fsdp", "--use-megatron-fsdp: FSDP shards what a replica must hold whole"),
        (FLAGS + " --expert-model-parallel-size 2", "--expert-model-parallel-size: there are no experts to spread"),
        (FLAGS + " --moe-router-load-balancing-type global_aux_loss", "--moe-router-load-balancing-type: global_aux"),
        (FLAGS + " --dataloader-type external", "--dataloader-type: unicrond deals micro-batches"),
        (FLAGS + " --optimizer dist_muon", "--optimizer: adam or sgd"),
        (FLAGS + " --dsa-indexer-loss-coeff 0.1", "--dsa-indexer-loss-coeff: a loss that Megatron scales"),
        (FLAGS + " --cuda-graph-impl local", "--cuda-graph-impl: CUDA graphs are not supported yet"),
        (
            FLAGS + " --pipeline-model-parallel-layout Et|t|ttL",
            "--pipeline-model-parallel-layout: its 3 stages do not divide among pp 2; use a multiple of pp",
        ),
        (
            FLAGS + " --num-experts 4 --expert-tensor-parallel-size 1",
            "--expert-tensor-parallel-size: 1 is not tp (2): with ep 1 Megatron sums no copies of an expert; leave it",
        ),
        (
            FLAGS + " --num-experts 4 --expert-model-parallel-size 3",
            "--expert-model-parallel-size: 3 does not divide 4 experts; use another",
        ),
        (FLAGS + " --num-experts 4 --expert-tensor-parallel-size 4", "--expert-tensor-parallel-size: 4 is not tp (2)"),
        (f"{FLAGS} {SHARDED} --fp16", f"{SHARDED}: Adam in fp32 or bf16 only; leave it out"),
        (f"{FLAGS} {SHARDED} --optimizer sgd", f"{SHARDED}: Adam in fp32 or bf16 only; leave it out"),
        (f"{FLAGS} {SHARDED} --save /x --ckpt-format torch", f"--ckpt-format: with {SHARDED} torch_dist only"),
        (f"{FLAGS} {SHARDED} --load /x --ckpt-format zarr", f"--ckpt-format: with {SHARDED} torch_dist only"),
        (FLAGS + " --train-samples 3", "--train-samples: fewer than one global batch of 16"),
    ],
)
def test_megatron_refuses_unsupported_flag_by_name(flags: str, reason: str) -> None:
    with pytest.raises(TaskFileError, match=r"^task file:4: args: ") as caught:
        loads(task(flags, min_workers=4, max_workers=4))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--context-parallel-size 1",
        "--cuda-graph-impl none",
        "--dataloader-type cyclic",
        "--expert-model-parallel-size=1",
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --num-experts 4",
        "--expert-tensor-parallel-size 1",
        "--fp16 --optimizer sgd --save /x --ckpt-format torch",
        f"{SHARDED} --bf16 --optimizer adam --save /x --load /x --ckpt-format torch_dist",
        f"{SHARDED} --ckpt-format torch",
    ],
)
def test_megatron_accepts_harmless_values_of_unsupported_flags(flags: str) -> None:
    assert loads(task(f"{FLAGS} {flags}", min_workers=4, max_workers=4)).tp == 2


def test_task_field_must_agree_with_megatron_flags() -> None:
    assert loads(task(global_batch=16, min_workers=4, max_workers=4)).global_batch == 16
    with pytest.raises(TaskFileError, match=r":5: global_batch: 32, but the flags in args say 16; leave it out here"):
        loads(task(global_batch=32, min_workers=4, max_workers=4))


def test_megatron_task_needs_checkout_and_script() -> None:
    with pytest.raises(TaskFileError, match="cwd: is not given; give the checkout of Megatron-LM"):
        loads(task(min_workers=4, max_workers=4).replace("cwd: /opt/Megatron-LM\n", ""))
    with pytest.raises(TaskFileError, match="args: are missing"):
        loads("name: lm\nentry: megatron-lm\ncwd: /opt/Megatron-LM\n")
    with pytest.raises(BadFlags, match="the first of args must be the script"):
        CommandLine.parse(["--lr", "1"])
    with pytest.raises(BadFlags, match="'5' stands before the first flag"):
        CommandLine.parse(["pretrain_gpt.py", "5"])


def test_submit_check_prints_interpretation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lm.yaml"
    path.write_text(task(FLAGS + " --save /data/lm --save-interval 100", min_workers=4, max_workers=8))
    assert load(path).max_workers == 8
    main(["submit", "--check", str(path)])
    assert capsys.readouterr().out == (
        f"{path}: task lm is valid\n"
        "  script pretrain_gpt.py, 500 iterations, seed 7\n"
        "  a replica is tp 2 x pp 2 = 4 workers\n"
        "  global batch 16 in micro-batches of 2: 8 to deal, so at most as many replicas\n"
        "  model: 4 layers, hidden 128, 8 heads, sequence 256, vocabulary 32000\n"
        "  the lead replica writes Megatron's checkpoints to /data/lm (every: 100); unicrond keeps its own\n"
    )


def test_flag_without_effect_is_taken_with_a_line() -> None:
    line = CommandLine.parse(["x.py", *FLAGS.split(), "--fp8-param-gather", "--num-distributed-optimizer-instances=1"])
    assert [note.partition(":")[0] for note in read_training_flags(line).notes] == [
        "--fp8-param-gather is without effect"
    ]


def test_megatron_example_is_valid() -> None:
    spec = load(Path(__file__).parents[2] / "examples" / "megatron-lm.yaml")
    assert spec.micro_batches == 16 and spec.model.layers == 24


# --- layouts -------------------------------------------------------------------------------------

SMALL = FLAGS + " --sequence-parallel"


def layouts_of(flags: str, **fields: object) -> list[tuple[int, int]]:
    return [(one.tp, one.pp) for one in loads(task(flags, min_workers=4, max_workers=8, **fields)).layouts]


def test_auto_layouts_divide_model_and_fit_memory() -> None:
    every = [(2, 2), (1, 1), (1, 2), (1, 4), (2, 1), (4, 1)]
    assert layouts_of(SMALL) == layouts_of(SMALL, layouts="auto") == every
    assert layouts_of(SMALL, layouts="fixed") == []
    assert layouts_of(SMALL + " --group-query-attention --num-query-groups 2") == every[:-1]
    assert layouts_of(SMALL.replace("--hidden-size 128", "--hidden-size 8192")) == [], "who knows what a worker holds"
    assert layouts_of(f"{SMALL} --num-experts 8")
    assert layouts_of(f"{SMALL} --num-experts 100000") == [], "each holds all of them"


def test_megatron_flag_restricts_layouts() -> None:
    staged = SMALL + " --num-layers-per-virtual-pipeline-stage 1 --decoupled-lr 1e-3"
    assert layouts_of(staged) == [(2, 2), (1, 2)]
    assert layouts_of(SMALL + " --tp-comm-overlap") == [(2, 2), (2, 1)]
    experts = FLAGS + " --num-experts 4"
    assert layouts_of(experts) == [(2, 2), (1, 1), (1, 2), (1, 4)]
    assert layouts_of(SMALL + " --make-vocab-size-divisible-by 1") == [(2, 2), (1, 1), (1, 2), (1, 4), (2, 1)]
    assert layouts_of(SMALL + " --multi-latent-attention") == layouts_of(SMALL + " --load /x") == []
    assert layouts_of(SMALL + " --load /x --ckpt-format torch_dist") == layouts_of(SMALL) != []
    assert layouts_of(SMALL + " --multi-latent-attention", layouts="[{tp: 1, pp: 4}]") == [(2, 2), (1, 4)]


def shapes_of(flags: str, **fields: object) -> list[Shape]:
    return [one.shape for one in loads(task(flags, min_workers=4, max_workers=8, **fields)).layouts]


CHUNKS = " --num-layers-per-virtual-pipeline-stage 1"
CP4 = " --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
EXPERTS = " --num-experts 4 --moe-ffn-hidden-size 6"


def test_virtual_stages_follow_pipeline_stages() -> None:
    """4 layers in 2 stages, a layer to a chunk. Without stages there are no chunks, with 4 stages no layer to spare."""
    staged = SMALL + CHUNKS
    spec = loads(task(staged, min_workers=4, max_workers=8))
    assert (spec.vpp, spec.shape) == (2, Shape(2, 2, vpp=2))
    assert loads(task(SMALL, min_workers=4, max_workers=8)).vpp == 0, "as the program has it"
    every = [(2, 2, 2), (1, 1, 1), (1, 2, 2), (1, 4, 1), (2, 1, 1), (4, 1, 1)]
    assert shapes_of(staged) == [Shape(tp, pp, vpp) for tp, pp, vpp in every]
    assert shapes_of(SMALL + " --num-virtual-stages-per-pipeline-rank 2") == shapes_of(staged)
    assert shapes_of(staged, layouts="[{tp: 2, pp: 2, vpp: 1..4}]") == [Shape(2, 2, 2), Shape(2, 2)]
    assert shapes_of(staged, layouts="[{tp: 1, pp: [1, 2]}]") == [Shape(2, 2, 2), Shape(), Shape(1, 2, 2)]
    alone = staged + " --no-overlap-p2p-communication"
    assert Shape(1, 2, 2) not in shapes_of(alone) and Shape(1, 2) in shapes_of(alone)


def test_experts_follow_tensor_parallel_groups() -> None:
    """4 experts of width 6: over 2 workers of tp 2 whole, of tp 4 in halves; over 4 of tp 4 whole."""
    flags = SMALL + EXPERTS + " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    spec = loads(task(flags, min_workers=4, max_workers=8))
    assert (spec.ep, spec.shape) == (2, Shape(2, 2, ep=2))
    own, apart = Shape(2, 2, ep=2), [Shape(2, 1, ep=2), Shape(4, 1, ep=2)]
    assert shapes_of(flags) == [own, Shape(), Shape(1, 2), Shape(1, 4), *apart]
    assert shapes_of(flags, layouts="[{tp: 4, ep: [1, 2, 4]}]") == [own, Shape(4, 1, ep=2), Shape(4, 1, ep=4)]


def test_context_parallel_workers_are_part_of_replica() -> None:
    """A sequence of 256 over 2 workers of each tensor-parallel group: 8 workers in a replica, 4 pieces of 64 tokens."""
    flags = FLAGS + " --context-parallel-size 2"
    spec = loads(task(flags, min_workers=8, max_workers=16))
    assert (spec.cp, spec.shape, spec.replica_workers, spec.lanes) == (2, Shape(2, 2, cp=2), 8, 2)
    assert spec.layouts == (), "nobody has tried another layout"
    listed = loads(task(FLAGS, min_workers=4, max_workers=16, layouts="[{tp: 2, pp: [1, 2], cp: [1, 2]}]")).layouts
    assert [layout.shape for layout in listed] == [Shape(2, 2), Shape(2), Shape(2, cp=2), Shape(2, 2, cp=2)]
    with pytest.raises(TaskFileError, match=r"min_workers: 4 is not a multiple of tp \* pp \* cp = 2 \* 2 \* 2; use 8"):
        loads(task(flags, min_workers=4, max_workers=16))
    assert loads(task(FLAGS.replace("256", "248") + CP4, min_workers=16, max_workers=16)).cp == 4
    with pytest.raises(TaskFileError, match=r"args: --seq-length: 250 does not divide in 8 pieces for cp \(4\)"):
        loads(task(FLAGS.replace("256", "250") + CP4, min_workers=16, max_workers=16))


def test_model_without_experts_has_one_layout_whatever_etp_says() -> None:
    listed = loads(task(FLAGS, min_workers=4, max_workers=16, layouts="[{tp: 4, etp: [1, 2, 4]}]")).layouts
    assert [layout.shape for layout in listed] == [Shape(2, 2), Shape(4)]


def test_experts_cut_otherwise_than_tp_over_ep_stand_in_task() -> None:
    """Over 2 workers of each of the 2 parts of a sequence."""
    flags = SMALL + EXPERTS + " --context-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size"
    assert loads(task(f"{flags} 2", min_workers=8, max_workers=8)).shape == Shape(2, 2, ep=2, cp=2, etp=2)
    assert loads(task(f"{flags} 1", min_workers=8, max_workers=8)).shape == Shape(2, 2, ep=2, cp=2)


def test_experts_over_tp_and_cp_stay_over_as_many_workers() -> None:
    """Where tp and cp have room for them: a reshape that names only pp says nothing of the experts."""
    flags = f"{SMALL} --num-experts 8 --moe-ffn-hidden-size 6 --context-parallel-size 4"
    flags += " --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
    spec = loads(task(flags, min_workers=16, max_workers=16))
    assert spec.shape == Shape(2, 2, cp=4, ep=8)
    assert nearest(spec, 2, 1) == Shape(2, 1, cp=4, ep=8) and nearest(spec, 4, 1) == Shape(4, 1, cp=4, ep=8)
    assert nearest(spec, 1, 2) == Shape(1, 2, cp=4, ep=4), "there is room for half as many"


def test_parts_of_experts_that_are_usual_are_not_another_layout() -> None:
    """`etp` may say what tp and ep say: the file agrees with its flags, and the layout is no second one."""
    bounds = {"min_workers": 4, "max_workers": 4}
    flags = f"{SMALL}{EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    assert loads(task(flags, etp=1, **bounds)) == loads(task(flags, **bounds))
    with pytest.raises(TaskFileError, match="etp: 2, but the flags in args say 0; leave it out here"):
        loads(task(flags, etp=2, **bounds))
    own = TaskSpec(name="lm", tp=4, ep=2, etp=2, max_workers=8, layouts=(LayoutSpec(tp=4, ep=2, etp=2),))
    assert own.shape == own.layouts[0].shape == Shape(4, ep=2) and layouts_of_task(own) == [Shape(4, ep=2)]
    asked = ReshapeRequested(task="lm", **Shape(4, ep=2)._asdict(), min_workers=4, max_workers=4, reason="")
    assert is_in_place(own, asked), "a bare change of bounds"


def test_experts_over_more_workers_than_tp_make_replica_larger() -> None:
    """4 experts, whole, over 4 workers: with tp 2 and pp 2 two data-parallel ranks, which share 16 samples by 2 x 2."""
    flags = SMALL + EXPERTS + " --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    spec = loads(task(flags, min_workers=8, max_workers=32))
    assert (spec.shape, spec.replica_workers, spec.replica_batch) == (Shape(2, 2, ep=4), 8, 2 * spec.micro_batch)
    assert spec.lanes == spec.micro_batches == spec.global_batch // spec.replica_batch
    assert spec.layouts == (), "nobody has tried another layout"
    assert nearest(spec, 1, 2) == Shape(1, 2, ep=4) and nearest(spec, 4, 1) == Shape(4, ep=4)
    listed = loads(task(SMALL + EXPERTS, min_workers=4, max_workers=16, layouts="[{tp: 2, ep: [1, 2, 4]}]")).layouts
    assert [layout.shape for layout in listed] == [Shape(2, 2), Shape(2), Shape(2, ep=2), Shape(2, ep=4)]


def test_batch_that_ranks_of_a_replica_cannot_share_is_all_that_is_said() -> None:
    flags = FLAGS.replace("size 16", "size 2").replace("--tensor-model-parallel-size 2", "--num-experts 8")
    text = task(f"{flags} --expert-model-parallel-size 4", min_workers=8, max_workers=8)
    with pytest.raises(
        TaskFileError, match=r"file: ep: 4 makes a replica of 4 data-parallel ranks, .*, or global_batch$"
    ):
        loads(text)


def test_own_loop_refuses_workers_that_nothing_shares_work_with(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("")
    for wrong, reason in (
        ("cp: 2", "cp: is 2, but context parallelism is not for a loop of your own yet; use 1, or entry: megatron-lm"),
        (
            "pp: 2\nep: 2",
            "ep: 2 does not divide tp (1): experts over more workers than that are not for a loop of your",
        ),
        ("tp: 2\nep: 3", "ep: 3 does not divide tp (2): experts over more workers than that are not for a loop"),
        ("tp: 4\nep: 2\netp: 1", "etp: is 1, but times ep (2) it must be tp (4) in a loop of your own, which sums"),
        ("tp: 2\netp: 1", "etp: is 1, but times ep (1) it must be tp (2) in a loop of your own"),
        ("tp: 2\netp: 4", "etp: is 4, but times ep (1) it must be tp (2) in a loop of your own"),
        ("tp: 2\netp: 3", "etp: is 3, but times ep (1) it must be tp (2) in a loop of your own"),
    ):
        with pytest.raises(TaskFileError) as caught:
            loads(f"name: a\nentry: {script}\n{wrong}\nmin_workers: 4\nmax_workers: 8")
        assert reason in str(caught.value)
        assert "data-parallel" not in str(caught.value), "it says what is at fault, and no more"
    file = f"name: a\nentry: {script}\ntp: 4\nep: 2\nmin_workers: 4\nmax_workers: 8"
    assert loads(f"{file}\netp: 2") == loads(file), "where etp says the same, the task is the same"


def test_own_loop_may_share_samples_over_the_workers_of_a_replica(tmp_path: Path) -> None:
    """Over which it shards its model by itself (`fully_shard`)."""
    script = tmp_path / "loop.py"
    script.write_text("")
    file = f"name: a\nentry: {script}\nep: 4\nmin_workers: 4\nmax_workers: 8\nmicro_batch: 2\nglobal_batch: "
    spec = loads(f"{file}16")
    assert (spec.replica_workers, spec.replica_batch, spec.micro_batches) == (4, 8, 2)
    with pytest.raises(TaskFileError, match=r"ep: 4 makes a replica of 4 data-parallel ranks, and global_batch \(20\)"):
        loads(f"{file}20")


@pytest.mark.parametrize(
    ("flags", "layouts", "reason"),
    [
        (
            FLAGS,
            "[{tp: 3}]",
            "layouts[0]: --num-attention-heads: 8 does not divide among tp (3); use another tp",
        ),
        (FLAGS, "[{pp: 1, vpp: 2}]", "layouts[0]: vpp: 2 chunks of a stage are interleaved from pp 2 on; use vpp 1"),
        (FLAGS, "[{pp: 2, vpp: 3}]", "layouts[0]: --num-layers: 2 of a stage do not divide among vpp (3)"),
        (
            FLAGS,
            "[{tp: 2, cp: 3}]",
            "layouts[0]: --seq-length: 256 does not divide in 6 pieces for cp (3); use another",
        ),
        (
            FLAGS + CP4,
            "[{tp: 2, cp: 2}]",
            "layouts[0]: --hierarchical-context-parallel-sizes: binds cp to 4; keep that",
        ),
        (FLAGS, "[{ep: 2}]", "layouts[0]: --num-experts: is not given; use ep 1"),
        (FLAGS, "[{tp: 4, etp: [1, 2]}]", "layouts[0]: --num-experts: is not given; leave etp out"),
        (SMALL + EXPERTS, "[{tp: 2, ep: 3}]", "layouts[0]: --num-experts: 4 do not divide among ep (3); use another"),
        (SMALL + " --num-experts 3", "[{tp: 2, ep: 2}]", "layouts[0]: --num-experts: 3 do not divide among ep (2)"),
        (SMALL + EXPERTS, "[{tp: 4}]", "layouts[0]: --moe-ffn-hidden-size: 6 does not divide among tp / ep (4)"),
        (SMALL + EXPERTS, "[{tp: 2, pp: 1, ep: 1, etp: 1}]", "layouts[0]: etp: 1 is not tp (2): with ep 1 Megatron"),
        (
            SMALL + EXPERTS,
            "[{tp: 2, etp: 0}]",
            "layouts[0].etp: 0 is not a size; leave it out where experts are cut as",
        ),
        (FLAGS, "[{pp: 3}]", "layouts[0]: --num-layers: 4 does not divide among pp (3)"),
        (FLAGS + " --group-query-attention --num-query-groups 2", "[{tp: 4}]", "layouts[0]: --num-query-groups: 2"),
        (
            FLAGS + " --num-experts 4",
            "[{tp: 4}]",
            "layouts[0]: --num-experts: with tp above 1 they need --sequence-par",
        ),
        (
            FLAGS + " --decoder-first-pipeline-num-layers 1",
            "[{pp: 1}]",
            "--decoder-first-pipeline-num-layers: binds pp",
        ),
        (FLAGS + " --load /x --ckpt-format torch", "[{tp: 1}]", "--ckpt-format: checkpoints of torch are read in the"),
        (FLAGS + " --make-vocab-size-divisible-by 1", "[{tp: 4}]", "--make-vocab-size-divisible-by: 2 does not divide"),
        (
            FLAGS + " --fp8-format hybrid",
            "auto",
            "layouts: auto, but args: --fp8-format: nobody has tried it in another",
        ),
        (FLAGS + " --load /x", "auto", "layouts: auto, but args: --load: can be read in another layout with"),
    ],
)
def test_layouts_refuse_restart_forbidden_by_flag(flags: str, layouts: str, reason: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        loads(task(flags, min_workers=4, max_workers=8, layouts=layouts))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_auto_layouts_refuse_unknown_script() -> None:
    text = task(SMALL, min_workers=4, max_workers=8).replace("pretrain_gpt.py", "/opt/mine/pretrain_mine.py")
    assert loads(text).layouts == ()
    with pytest.raises(TaskFileError, match=r"auto, but args: of /opt/mine/pretrain_mine\.py nobody has tried another"):
        loads(f"{text}layouts: auto\n")


def test_reshape_refuses_layout_forbidden_by_flags() -> None:
    spec = loads(task(FLAGS, min_workers=4, max_workers=8))
    (fault,) = spec_faults(replace(spec, layouts=(), tp=4, pp=3, min_workers=12, max_workers=12))
    assert str(fault) == "args: --num-layers: 4 does not divide among pp (3); use another pp"
    assert not list(spec_faults(replace(spec, layouts=(), tp=4, pp=2, min_workers=8, max_workers=8)))


def test_nearest_layout_compares_with_task() -> None:
    spec = loads(task(SMALL + CHUNKS, min_workers=4, max_workers=8))
    assert [nearest(spec, *cut) for cut in ((2, 2), (1, 2), (2, 1))] == [Shape(2, 2, 2), Shape(1, 2, 2), Shape(2, 1)]
    reshaped = replace(spec, vpp=1)
    assert [nearest(reshaped, *cut) for cut in ((2, 2), (1, 2))] == [Shape(2, 2), Shape(1, 2)]
    own = replace(spec, entry="/train.py", args=(), tp=6, pp=2, vpp=3, ep=6)
    assert [nearest(own, *cut) for cut in ((4, 2), (6, 1), (3, 4))] == [
        Shape(4, 2, 3, 4),
        Shape(6, 1, 1, 6),
        Shape(3, 4, 3, 3),
    ]


def test_gpu_table_applies_to_nearest_layout() -> None:
    told = "[{gpu: h, layouts: [{tp: 2, pp: 2, throughput: {4: 7}}, {tp: 2, pp: 2, vpp: 1, throughput: {4: 5}}]}]"
    spec = loads(task(SMALL + CHUNKS, min_workers=4, max_workers=8, gpus=told))
    assert [one.shape for one in spec.gpus[0].layouts] == [Shape(2, 2, vpp=2), Shape(2, 2)]
    assert spec_on(spec, "h").throughput == {"4": 7}


SEVEN_B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 51200"
    " --micro-batch-size 1 --global-batch-size 1024 --train-iters 500 --seed 7 --hidden-dropout 0.0 --bf16"
    " --sequence-parallel --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
)


def test_throughput_model_uses_chunks_of_stages() -> None:
    def of(flags: str, **more: str) -> TaskSpec:
        preset = "{model: gpt3-7b, gpu: a100-80g, also: [h100-80g]}"
        return loads(task(SEVEN_B + flags, min_workers=8, max_workers=64, throughput_model=preset, **more))

    plain, chunked = of("", layouts="fixed"), of(" --num-virtual-stages-per-pipeline-rank 4", layouts="fixed")
    assert 0 < chunked.throughput["64"] != plain.throughput["64"] > 0
    free = of("")
    assert (free.vpp, free.throughput) == (0, plain.throughput)
    assert [one for one in free.layouts if one.vpp > 1], "all numbers of chunks are tried"
    assert [one.shape for one in free.gpus[0].layouts] == [one.shape for one in free.layouts]


def test_script_task_starts_in_stages_with_chunks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    spec = loads(
        f"name: a\nentry: {tmp_path / 'mine.py'}\nmin_workers: 8\nmax_workers: 64\nmicro_batch: 1\n"
        "layouts: [{tp: 2, pp: 2, vpp: 8}]\nthroughput_model: {model: gpt3-7b, gpu: a100-80g}\n"
    )
    assert spec.shape == Shape(2, 2, vpp=8)
