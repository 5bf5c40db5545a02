"""Task files: what they mean, and that every mistake gets one line with file, line, field and fix."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unicrond.core.tasks.reshaping import most_workers
from unicrond.core.tasks.task_rules import SPEC_BYTES_MAX, spec_faults
from unicrond.core.tasks.task_validation import task_problems
from unicrond.core.worth.waf import in_layout, modelled
from unicrond.events.host.task_environment import SETTINGS
from unicrond.events.vocabulary import (
    DETERMINISTIC,
    CheckpointSpec,
    ModelSpec,
    OptimizerSpec,
    StartWorker,
    StoreAddress,
    TaskSpec,
)
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope
from unicrond.intake.strict_yaml import BadYaml, parse
from unicrond.intake.task_file import TaskFileError, is_file, load, loads, with_start
from unicrond.throughput.layouts import job
from unicrond.throughput.model import table
from unicrond.throughput.presets import GPUS, MODELS

ROOT = Path(__file__).parents[2]


def complaint(text: str) -> str:
    with pytest.raises(TaskFileError) as caught:
        loads(text, where="t.yaml")
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_task_examples_are_valid(path: Path) -> None:
    spec = load(path)
    assert spec.name == path.stem
    assert task_problems(spec, is_file=is_file) == []


def test_documentation_example_names_every_field(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "use" / "task-files.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    spec = loads(example, directory=tmp_path)
    named = parse(example).value
    assert named.pop("numerics") == "fixed" and named.pop("deterministic") == "check"
    named["accumulation"] = "exact"  # as the log has it
    for kind, part in (
        (TaskSpec, named),
        (ModelSpec, named["model"]),
        (OptimizerSpec, named["optimizer"]),
        (CheckpointSpec, named["checkpoint"]),
    ):
        fields = set(kind.__struct_fields__) - {"start"}  # `submit` says that, by its flags
        assert set(part) == fields, kind
        for field in fields:
            assert f"`{field}`" in text, f"docs/use/task-files.md does not describe {field}"
    assert spec.name == "pretrain-small"


def test_task_needs_only_name() -> None:
    assert loads("name: a") == TaskSpec(name="a", accumulation="exact", env={"UNICRON_LANES": "1"})


@pytest.mark.parametrize(
    ("line", "on_the_log"),
    [("numerics: fixed", "exact"), ("numerics: follow", "float"), ("accumulation: exact", "exact"),
     ("accumulation: float", "float")],
)  # fmt: skip
def test_numerics_select_fixed_or_following_sums(line: str, on_the_log: str, caplog: pytest.LogCaptureFixture) -> None:
    """In older files they were called otherwise: these are taken, with a line that says so."""
    assert loads(f"name: a\n{line}", where="t.yaml").accumulation == on_the_log
    told = [record.getMessage() for record in caplog.records]
    today = {"exact": "fixed", "float": "follow"}[on_the_log]
    older = f"t.yaml:2: accumulation: {on_the_log} is called numerics: {today} now; write that"
    assert told == ([older] if line.startswith("accumulation") else [])


def test_task_file_refuses_unclear_numerics() -> None:
    assert "numerics: 'exact' is not one of fixed, follow" in complaint("name: a\nnumerics: exact")
    assert "keep numerics" in complaint("name: a\nnumerics: fixed\naccumulation: float")


def test_deterministic_setting_becomes_environment_variable() -> None:
    assert loads("name: a\ndeterministic: require").env["UNICRON_DETERMINISTIC"] == "require"
    assert loads("name: a\ndeterministic: off\nenv: {A: b}").env["A"] == "b"
    assert "UNICRON_DETERMINISTIC" not in loads("name: a").env
    assert "deterministic: 'yes' is not one of check, require, off" in complaint("name: a\ndeterministic: yes")
    assert "keep one" in complaint("name: a\ndeterministic: off\nenv: {UNICRON_DETERMINISTIC: require}")
    assert "env.UNICRON_DETERMINISTIC: 'no' is not one" in complaint("name: a\nenv: {UNICRON_DETERMINISTIC: no}")


@pytest.mark.parametrize(
    ("workers", "batch", "lanes"), [(8, 32, 4), (6, 3, 3), (2, 8, 1)], ids=["replicas", "micro-batches", "one"]
)
def test_lanes_default_to_replica_maximum(workers: int, batch: int, lanes: int) -> None:
    spec = loads(f"name: a\nmax_workers: {workers}\nmin_workers: 2\ntp: 2\nglobal_batch: {batch}\nnumerics: fixed")
    assert spec.lanes == lanes
    assert replace(spec, max_workers=64).lanes == lanes, "it is a constant"
    told = loads("name: a\nglobal_batch: 8\nenv: {UNICRON_LANES: '4'}")
    assert told.lanes == 4
    assert "UNICRON_LANES" in complaint("name: a\nglobal_batch: 8\nenv: {UNICRON_LANES: '9'}")


def test_yaml_scalars_parse_as_people_mean() -> None:
    spec = loads(
        "name: no\noptimizer: {lr: 1e-3}\nseed: 010\nenv: {DEBUG: on, AT: 12:30}\n"
        "throughput: {1: 1.9e12, 2: 3e12}\nmax_workers: 2"
    )
    assert spec.name == "no"
    assert spec.optimizer.lr == 1e-3
    assert spec.seed == 10
    assert spec.env == {"DEBUG": "on", "AT": "12:30", "UNICRON_LANES": "2"}
    assert spec.throughput == {"1": 1_900_000_000_000, "2": 3_000_000_000_000}


def test_paths_start_at_directory_of_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "task.yaml").write_text("name: a\nentry: train.py\ncwd: .\ndata: d/corpus\ncheckpoint: {dir: /ckpt}\n")
    spec = load(tmp_path / "task.yaml")
    assert spec.entry == str(tmp_path / "train.py")
    assert Path(spec.cwd) == tmp_path
    assert spec.data == str(tmp_path / "d" / "corpus")
    assert spec.checkpoint.dir == "/ckpt"


def test_checkpoint_url_stays_as_it_is(tmp_path: Path) -> None:
    spec = loads("name: a\ncheckpoint: {dir: 's3://bucket/a/b-1.2'}\n", directory=tmp_path)
    assert spec.checkpoint.dir == "s3://bucket/a/b-1.2"
    fork = with_start(spec, "", fork="b", prove=False, where="t.yaml")
    assert fork.checkpoint.dir == "s3://bucket/a/b" and fork.start is not None
    assert fork.start.source_dir == spec.checkpoint.dir


def test_task_spec_survives_round_trip(tmp_path: Path) -> None:
    spec = loads("name: a\nweight: 0.5\nmodel: {layers: 4}\nmax_workers: 4\nthroughput: {1: 5}\n", directory=tmp_path)
    assert loads(msgspec.json.encode(spec).decode()) == spec  # JSON is YAML


# --- what is wrong -------------------------------------------------------------------------------

MISTAKES = [
    ("", "t.yaml: is empty; the minimum is `name: my-task`"),
    ("[1]", "t.yaml: expected fields such as name, weight, min_workers, got a list"),
    ("weight: 1", "t.yaml: name: missing; add the line `name: ...`"),
    ("name: a\nname: b", "t.yaml:2: name appears twice; remove one (the other is on line 1)"),
    ("name: a b", "t.yaml:1: name: 'a b' is not a valid name; use letters, digits, - and _"),
    ("name: 12", "t.yaml:1: name: expected text, got 12; put it in quotes"),
    ("name: a\nmodel:\n  layerz: 2", "t.yaml:3: model.layerz: unknown field; did you mean layers?"),
    ("name: a\nmodel:\n  layers: two", "t.yaml:3: model.layers: expected a whole number, got text 'two'"),
    ("name: a\nmodel: 3", "t.yaml:2: model: expected fields such as layers, hidden, heads, got 3"),
    ("name: a\nmin_workers: 0", "t.yaml:2: min_workers: must be a whole number >= 1, got 0"),
    ("name: a\nweight: -1", "t.yaml:2: weight: must be a number > 0.0, got -1"),
    ("name: a\nweight: .inf", "t.yaml:2: weight: must be a number <= 1000000.0, got inf"),
    ("name: a\noptimizer: {weight_decay: .inf}", "t.yaml:2: optimizer.weight_decay: inf is not finite"),
    ("name: a\nargs: [--lr, 3]", "t.yaml:2: args[1]: expected text, got 3; put it in quotes"),
    ("name: a\nenv: {A: 1}", "t.yaml:2: env.A: expected text, got 1; put it in quotes"),
    ("name: a\nenv: {A-B: x}", "t.yaml:2: env.A-B: is not a variable's name"),
    ("name: a\nenv: {LD_PRELOAD: /x.so}", "t.yaml:2: env.LD_PRELOAD: would load other code into every process"),
    ("name: a\nenv: {GLIBC_TUNABLES: x}", "t.yaml:2: env.GLIBC_TUNABLES: would load other code"),
    ("name: a\nenv: {UNICRON_LEASE: '5'}", "t.yaml:2: env.UNICRON_LEASE: is not a setting of workers"),
    ("name: a\nenv: {CUDA_VISIBLE_DEVICES: '0'}", "t.yaml:2: env.CUDA_VISIBLE_DEVICES: is the agent's to set"),
    ("name: a\nenv: {NOTIFY_SOCKET: /x}", "t.yaml:2: env.NOTIFY_SOCKET: is the agent's to set; remove it"),
    ("name: a\nrun_as: Not A User", "t.yaml:2: run_as:"),
    ("name: a\nsecrets: {UNICRON_LEASE_S: 'env:X'}", "t.yaml:2: secrets.UNICRON_LEASE_S: is a variable that may not"),
    ("name: a\nsecrets: {A-B: 'env:X'}", "t.yaml:2: secrets.A-B: is not a variable's name"),
    ("name: a\nsecrets: {A: hunter2}", "t.yaml:2: secrets.A: the value itself would stand in the log; give file:/PATH"),
    ("name: a\nsecrets: {A: 'file:here'}", "t.yaml:2: secrets.A: the value itself"),
    ("name: a\nsecrets: {LD_PRELOAD: 'env:X'}", "t.yaml:2: secrets.LD_PRELOAD: is a variable that may not be set"),
    ("name: a\nenv: {A: b}\nsecrets: {A: 'env:X'}", "t.yaml:3: secrets.A: stands in env too; remove it there"),
    ("name: a\nbackend: ncl", "t.yaml:2: backend: unknown value 'ncl'; did you mean nccl?"),
    ("name: a\nentry: nowhere.py", "nowhere.py' is not a file; give gpt, megatron-lm or the path of a script"),
    ("name: a\nargs: [x]", "t.yaml:2: args: entry gpt takes none"),
    ("name: a\nmin_workers: 3\nmax_workers: 2", "t.yaml:2: min_workers: 3 is more than max_workers (2); lower it"),
    (
        "name: a\ntp: 2\nmin_workers: 2\nmax_workers: 5",
        "max_workers: 5 is not a multiple of tp * pp = 2 * 1; use 4 or 6",
    ),
    ("name: a\nglobal_batch: 9\nmicro_batch: 2", "global_batch: 9 is not a multiple of micro_batch (2); use 8 or 10"),
    ("name: a\nmax_workers: 9", "max_workers: 9 replicas share 8 micro-batches, so some would idle; use at most 8"),
    ("name: a\nmodel: {hidden: 66}", "model.hidden: 66 does not divide among heads (4); use 64 or 68"),
    ("name: a\ntp: 3\nmin_workers: 3\nmax_workers: 3", "model.heads: 4 does not divide among tp (3); use 3 or 6"),
    ("name: a\npp: 2\nmin_workers: 2\nmax_workers: 2\nmodel: {layers: 3}", "3 does not divide among pp (2)"),
    ("name: a\nthroughput: {2: 5}", "t.yaml:2: throughput.2: must be a number of workers, 1 to max_workers (1)"),
    ("name: a\nthroughput: {01: 5}", "t.yaml:2: throughput.01: must be a number of workers"),
    ("name: a\nthroughput: {1: 1.5}", "t.yaml:2: throughput.1: expected a whole number, got 1.5"),
    ("name: a\nthroughput: {1: 0}", "t.yaml:2: throughput: every entry is 0"),
    ("name: a\nweight: 1e-30", "t.yaml:2: weight: 1e-30 is too small to count"),
    ("name: a\nweight: 1e6\nthroughput: {1: 9e18}", "t.yaml:2: weight: 1e+06 * 9e+18 FLOP/s is more than"),
    ("name: a\nthroughput: {1: 5e18}", "t.yaml: weight: 1 * 5e+18 FLOP/s is more than the planner can add up"),
    ("name: a\nmax_workers: 2000000000\nglobal_batch: 4000000000", "must be a whole number <= 131072, got 2000000000"),
    ("name: a\noptimizer: {min_lr: 1}", "optimizer.min_lr: 1 is more than lr (0.001); lower it"),
    ("name: a\noptimizer: {warmup_iterations: 100}", "warmup_iterations: 100 leaves nothing of iterations (100)"),
    ("nam: a", "t.yaml:1: nam: unknown field; did you mean name? (and 1 more)"),
    ("name: &x a\nentry: *x", "t.yaml:1: anchors and aliases (& and *) are not supported"),
    ("name: !!python/name:os.system x", "t.yaml:1: tag tag:yaml.org,2002:python/name:os.system is not supported"),
    ("name: a\nmodel: {layers: 2", "t.yaml:2: not valid YAML"),
    (
        "name: a\ncheckpoint: {dir: 'gs://b/p'}",
        "t.yaml:2: checkpoint.dir: 'gs' is none of the object stores that are taken (s3); give one like s3://bucket/prefix",
    ),
    ("name: a\ncheckpoint: {dir: 's3://'}", "'s3://' is not the URL of a prefix in an object store; give one like s3://b"),
    ("name: a\ncheckpoint: {dir: 's3://b//x'}", "'s3://b//x' is not the URL of a prefix"),
    ("name: a\ncheckpoint: {dir: 's3://b/../x'}", "'s3://b/../x' is not the URL of a prefix"),
    ("name: a\ncheckpoint: {dir: 's3://b/x y'}", "'s3://b/x y' is not the URL of a prefix"),
    ("name: a\ncheckpoint: {dir: 's3://KEY:PASS@b/x'}", "has an @ where a bucket and a prefix should be: credentials"),
    ("name: a\ncheckpoint: {dir: 's3://b/x?key=1'}", "credentials and options belong into the env"),
    ("? [1]\n: 2", "t.yaml:1: a key must be a plain word or number"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_task_file_mistake_gets_one_line_with_fix(text: str, said: str) -> None:
    assert said in complaint(text)


def test_unreadable_task_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(TaskFileError, match="is not UTF-8 text"):
        load(tmp_path / "latin.yaml")


def test_spec_from_wire_is_validated() -> None:
    assert task_problems(TaskSpec(name="a")) == []
    assert "absolute path" in str(task_problems(TaskSpec(name="a", data="corpus/x"))[0])
    assert "give gpt, megatron-lm or an absolute path" in str(task_problems(TaskSpec(name="a", entry="train.py"))[0])
    many = {f"V{number}": "x" * 1000 for number in range(100)}
    assert f"more than {SPEC_BYTES_MAX}" in str(task_problems(TaskSpec(name="a", env=many))[0])


@given(st.text())
def test_parser_gives_document_or_one_clear_error(text: str) -> None:
    try:
        parse(text)
    except BadYaml as error:
        assert error.line >= 1
        assert "\n" not in error.reason


def test_parser_refuses_deep_and_long_documents() -> None:
    assert "nested too deeply" in complaint("[" * 5000)
    assert "bytes" in complaint("#" * 300_000)


@given(
    st.builds(
        TaskSpec,
        name=st.just("t"),
        weight=st.floats(min_value=1e-12, max_value=1e6),
        min_workers=st.integers(1, 40),
        max_workers=st.integers(1, 40),
        tp=st.integers(1, 3),
        pp=st.integers(1, 3),
        global_batch=st.integers(1, 64),
        throughput=st.dictionaries(st.sampled_from(["1", "2", "02", "8", "x", ""]), st.integers(0, 2**63 - 1)),
        env=st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
    )
)
def test_valid_spec_can_be_planned_and_written(spec: TaskSpec) -> None:
    """The planner's table exists, its plan fits the log's integers, and a command can carry the spec."""
    if task_problems(spec, is_file=is_file):
        return
    assert max(int(spec.weight * flops) for flops in modelled(spec).points.values()) < 2**63
    store = StoreAddress(host="h", port=1)
    start = StartWorker(
        command_id="1.1.n.1", node="n", epoch=1, spec=spec, worker="t.1", replica=0, shard=0, store=store
    )
    encode(Envelope(producer="coordinator", boot=1, number=1, term=1, observed_at_us=0, event=start))


# --- a table from the throughput model ---------------------------------------------------------

SEVEN_B = "name: a\nmin_workers: 8\nmax_workers: 64\ntp: 4\nmicro_batch: 1\n"


def test_preset_fills_in_throughput_and_missing_fields() -> None:
    spec = loads(SEVEN_B + "throughput_model: {model: gpt3-7b, gpu: a100-80g}\n")
    expected = table(job(MODELS["gpt3-7b"], GPUS["a100-80g"], tp=4, pp=1, micro_batch=1), 64)
    assert spec.throughput == {str(workers): flops for workers, flops in expected.items()} != {}
    assert all(int(workers) % 4 == 0 for workers in spec.throughput)
    assert (spec.model.layers, spec.model.hidden, spec.global_batch) == (32, 4096, 1024)
    other = loads(
        SEVEN_B + "global_batch: 512\nthroughput_model: {model: gpt3-7b, gpu: a100-80g, stack: megatron-2022}"
    )
    assert other.global_batch == 512 and other.throughput != spec.throughput


def test_layout_needs_room_for_its_gradients() -> None:
    """16 lanes on 2, 3, 4 or more of 16 replicas: the fewer, the more sums a worker holds."""
    small = "throughput_model: {model: gpt3-7b, gpu: a100-40g}\n"
    follow, fixed = loads(f"{SEVEN_B}numerics: follow\n{small}"), loads(SEVEN_B + small)
    assert set(fixed.throughput) < set(follow.throughput)
    assert {"64", "32"} <= set(fixed.throughput) and "8" not in fixed.throughput
    assert all(fixed.throughput[workers] == follow.throughput[workers] for workers in fixed.throughput)
    with pytest.raises(TaskFileError, match=r"fits nowhere .* \(1024 lanes; fewer UNICRON_LANES or numerics: follow"):
        loads(f"{SEVEN_B}env: {{UNICRON_LANES: '1024'}}\n{small}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{model: gpt3-7b}", "t.yaml:6: throughput_model.gpu: missing; add the line"),
        ("{model: gpt3-7, gpu: a100-80g}", "t.yaml:6: throughput_model.model: unknown 'gpt3-7'; did you mean gpt3-7b?"),
        ("{model: gpt3-7b, gpu: a100}", "t.yaml:6: throughput_model.gpu: unknown 'a100'; did you mean a100-"),
        (
            "{model: gpt3-7b, gpu: a100-80g, stak: x}",
            "t.yaml:6: throughput_model.stak: unknown field; did you mean stack",
        ),
        ("{model: gpt3-175b, gpu: a100-40g}", "t.yaml:6: throughput_model: gpt3-175b with tp 4, pp 1"),
        ("{model: gpt3-7b, gpu: a100-80g}\nthroughput: {8: 5}", "t.yaml:6: throughput_model: and throughput are both"),
        ("{model: gpt3-7b, gpu: a100-80g}\nmodel: {layers: 4}", "t.yaml:7: model: an iteration of this model is"),
    ],
)
def test_bad_preset_is_reported_in_one_line(line: str, told: str) -> None:
    with pytest.raises(TaskFileError) as error:
        loads(SEVEN_B + f"throughput_model: {line}\n", where="t.yaml")
    assert str(error.value).startswith(told), error.value


def test_spec_refuses_variables_that_change_worker_program() -> None:
    spec = TaskSpec(name="a", run_as="alice", env={"LD_PRELOAD": "/x.so"})
    (said,) = [str(fault) for fault in spec_faults(spec)]
    assert said.startswith("env.LD_PRELOAD: ")


def test_task_file_accepts_every_worker_setting() -> None:
    env = dict.fromkeys(SETTINGS, "1") | {DETERMINISTIC: "require"}
    assert not [*spec_faults(TaskSpec(name="a", env=env))]
    table = (ROOT / "docs" / "operate" / "configuration.md").read_text()
    assert set(re.findall(r"^\| `(UNICRON_[A-Z_]+)` \| worker ", table, re.MULTILINE)) == SETTINGS


# --- layouts -------------------------------------------------------------------------------------


def layouts_of(text: str) -> list[tuple[int, int, int]]:
    """tp, pp and the entries of the table of each layout."""
    return [(one.tp, one.pp, len(one.throughput)) for one in loads(f"name: a\n{text}").layouts]


@pytest.mark.parametrize(
    ("text", "layouts"),
    [
        ("", []),
        ("max_workers: 4", []),
        ("tp: 2\nmin_workers: 2\nmax_workers: 4", [(2, 1, 0), (1, 1, 0), (1, 2, 0)]),
        ("tp: 2\nmin_workers: 2\nmax_workers: 4\nlayouts: fixed", []),
        ("tp: 2\nmax_workers: 3\nlayouts: auto", [(2, 1, 0), (1, 1, 0), (1, 2, 0)]),
        ("max_workers: 8\nlayouts: [{tp: [1, 2, 3]}, {tp: 4, pp: 1..3}]", [(1, 1, 0), (2, 1, 0), (4, 1, 0), (4, 2, 0)]),
        ("tp: 2\nmax_workers: 3\nlayouts: [{throughput: {1: 1e12, 2: 2e12}}]", [(2, 1, 0), (1, 1, 2)]),
        (
            "tp: 2\nmax_workers: 3\nthroughput: {2: 3e12}\nlayouts: [{pp: 2}, {throughput: {1: 1e12}}]",
            [(2, 1, 1), (1, 2, 1), (1, 1, 1)],
        ),
        ("tp: 2\nmin_workers: 2\nmax_workers: 4\nmodel: {hidden: 8192, layers: 48}", [(2, 1, 0), (1, 2, 0)]),
    ],
)
def test_layouts_parse_to_shapes(text: str, layouts: list[tuple[int, int, int]]) -> None:
    assert layouts_of(text) == layouts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layouts: many", "layouts: give auto, fixed, or a list like"),
        ("layouts: []", "layouts: give auto, fixed, or a list like"),
        ("layouts: [{tq: 2}]", "layouts[0]: unknown field tq; give tp, pp, vpp, ep, cp, etp, micro_batch and"),
        ("layouts: [{tp: 0}]", "layouts[0].tp: 0 is not a size"),
        ("max_workers: 2\nlayouts: [{tp: 1..200, pp: 1..200}]", "layouts[0]: comes to 40000 layouts; give narrower"),
        (
            "min_workers: 8\nmax_workers: 8\nlayouts: [{micro_batch: [4, 8]}]",
            "min_workers: 8 is more than any layout gets (1): no more replicas than lanes (1)",
        ),
        ("layouts: [{micro_batch: 0}]", "layouts[0].micro_batch: 0 is not a size"),
        ("layouts: [{tp: 1000000}]", "layouts[0].tp: 1000000 is not a size"),
        ("max_workers: 2\nlayouts: [{pp: 2, vpp: 2}]", "layouts[0]: vpp: is 2, but the built-in GPT has no virtual"),
        ("vpp: 2", "vpp: is 2, but the built-in GPT has no virtual pipeline stages; leave it out"),
        ("ep: 2", "ep: is 2, but the built-in GPT has no experts; leave it out"),
        ("global_batch: 5040\nlayouts: [{micro_batch: 1..90}]", "does not divide global_batch (5040)"),
        ("max_workers: 2\nlayouts: [{tp: 2, micro_batch: 3}]", "layouts[0].micro_batch: 3 does not divide"),
        ("layouts: [{tp: 4..2}]", "layouts[0].tp: '4..2' is not a size"),
        ("max_workers: 6\nlayouts: [{tp: 3}]", "layouts[0]: none of its sizes divide the model on up to 6 workers"),
        ("max_workers: 4\nlayouts: [{tp: [1, 2], throughput: {2: 5}}]", "layouts[0].throughput: is of one layout"),
        (
            "max_workers: 4\nlayouts: [{tp: 2, throughput: {8: 5}}]",
            "throughput.8: must be a number of workers",
        ),
        ("tp: 2\nmin_workers: 2\nmax_workers: 3", "max_workers: 3 is not a multiple of tp * pp"),
    ],
)
def test_task_file_refuses_bad_layouts(text: str, told: str) -> None:
    with pytest.raises(TaskFileError) as error:
        loads(f"name: a\n{text}")
    assert told in str(error.value)


def test_own_loop_keeps_layout_by_default(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("")
    text = f"entry: {script}\ntp: 2\nmin_workers: 2\nmax_workers: 4"
    assert layouts_of(text) == []
    assert layouts_of(f"{text}\nlayouts: [{{tp: 1}}]") == [(2, 1, 0), (1, 1, 0)]
    inner = loads(f"name: a\n{text}\nlayouts: [{{tp: [1, 2], pp: [1, 2], vpp: [1, 2], ep: [1, 2]}}]").layouts
    first = [Shape(2), Shape(), Shape(1, ep=2), Shape(1, 2), Shape(1, 2, vpp=2), Shape(2, ep=2)]
    assert [one.shape for one in inner] == first + [Shape(2, 2, vpp, ep) for vpp in (1, 2) for ep in (1, 2)]
    for wrong, told in (("vpp: 2", "vpp: is 2, but chunks of a stage"), ("ep: 3", "ep: 3 does not divide tp (2)")):
        with pytest.raises(TaskFileError, match=re.escape(told)):
            loads(f"name: a\n{text}\n{wrong}")


def test_layout_entry_sets_micro_batch() -> None:
    """Global batch 8: no more replicas than micro-batches, no more lanes than the layout with the largest has."""
    spec = loads("name: a\ntp: 2\nmax_workers: 8\nlayouts: [{tp: 1, pp: [1, 2], micro_batch: 4}, {tp: 4}]")
    sizes = [(one.tp, one.pp, one.micro_batch) for one in spec.layouts]
    assert sizes == [(2, 1, 1), (1, 1, 4), (1, 2, 4), (4, 1, 1)]
    assert spec.lanes == spec.fewest_micro_batches == 2
    assert [most_workers(spec, one.shape) for one in spec.layouts] == [4, 2, 4, 8]
    assert [in_layout(spec, one.shape).micro_batch for one in spec.layouts] == [1, 4, 4, 1]
    same = loads("name: a\ntp: 2\nmax_workers: 8\nmicro_batch: 2\nlayouts: [{tp: 1}]")
    assert [one.micro_batch for one in same.layouts] == [0, 0], "the log of who names none stays as it is"


def test_layouts_offer_micro_batch_sizes_to_plan() -> None:
    """Of one tp and pp, each with its own curve."""
    tables = "layouts: [{throughput: {1: 9, 2: 16}}, {micro_batch: 4, throughput: {1: 12, 2: 12}}]"
    spec = loads(f"name: a\nmax_workers: 2\n{tables}")
    assert [(one.shape, one.throughput) for one in spec.layouts] == [
        (Shape(micro_batch=1), {"1": 9, "2": 16}),
        (Shape(micro_batch=4), {"1": 12, "2": 12}),
    ]
    assert spec.shape == Shape(micro_batch=1) and spec.throughput == {"1": 9, "2": 16}
    several = loads("name: a\nmax_workers: 2\nlayouts: [{micro_batch: [1, 2, 4]}]")
    assert [one.micro_batch for one in several.layouts] == [1, 2, 4]
    many = "name: a\nglobal_batch: 5040\nmax_workers: 2\nlayouts: [{tp: [1, 2], micro_batch: [%s]}]"
    sizes = [size for size in range(1, 100) if 5040 % size == 0]
    with pytest.raises(TaskFileError, match="layouts: are 68, more than 64; give fewer"):
        loads(many % ", ".join(map(str, sizes)))


def test_preset_knows_micro_batches_of_each_layout() -> None:
    text = "name: a\ntp: 8\nmin_workers: 8\nmax_workers: 16\nthroughput_model: {model: gpt3-7b, gpu: a100-80g}\n"
    one, four = (
        {(o.tp, o.pp): o for o in loads(f"{text}layouts: [{{tp: [2, 4], micro_batch: {n}}}]").layouts} for n in (1, 4)
    )
    shared = (one.keys() & four.keys()) - {(8, 1)}
    assert shared and all(one[shape].throughput != four[shape].throughput for shape in shared)
    assert all(four[shape].micro_batch == 4 for shape in shared)


def test_lanes_match_replica_maximum_of_any_layout() -> None:
    text = "name: a\ntp: 2\nmin_workers: 2\nmax_workers: 4"
    assert loads(f"{text}\nlayouts: auto").lanes == 4
    spec = loads(text)
    assert spec.lanes == loads(f"{text}\nlayouts: fixed").lanes == 2, "who says nothing of it keeps the bits"
    assert most_workers(spec, Shape(1, 1)) == 2


def test_preset_gives_table_for_each_best_layout() -> None:
    text = "name: a\nmax_workers: 64\nnumerics: follow\nthroughput_model: {model: gpt3-13b, gpu: a100-80g}\n"
    spec = loads(f"{text}layouts: auto")
    assert len(spec.layouts) > 1 and (spec.layouts[0].tp, spec.layouts[0].pp) == (spec.tp, spec.pp)
    assert spec.throughput == spec.layouts[0].throughput
    best: dict[int, int] = {}
    for one in spec.layouts:
        for workers, flops in one.throughput.items():
            best[int(workers)] = max(flops, best.get(int(workers), 0))
    fixed = loads(f"{text}tp: 8\nlayouts: fixed\nmin_workers: 8").throughput
    assert all(flops <= best[int(workers)] for workers, flops in fixed.items())
    assert spec.min_workers == min(best)


def test_large_throughput_tables_have_fewer_points() -> None:
    """So that the task fits into an event; no point says more than the model, or less by more than half a percent."""
    text = "name: a\nnumerics: follow\nlayouts: auto\nthroughput_model: {model: gpt3-7b, gpu: a100-80g}\n"
    large, small = (loads(f"{text}max_workers: {most}") for most in (4096, 1024))
    assert len(msgspec.msgpack.encode(large)) <= SPEC_BYTES_MAX * 3 // 4
    assert len(large.layouts) >= len(small.layouts) > 1
    alike = {one.shape: one for one in small.layouts}
    compared = 0
    for one in large.layouts:
        for workers, flops in (alike[one.shape].throughput if one.shape in alike else {}).items():
            told = max((t for n, t in one.throughput.items() if int(n) <= int(workers)), default=0)
            assert 0.995 * flops <= told
            compared += 1
        assert all(one.throughput[n] == t for n, t in one.throughput.items())
    assert compared > 100


def test_gpu_types_have_own_throughput() -> None:
    given = loads(
        "name: t\ntp: 2\nmax_workers: 4\nmin_workers: 2\n"
        "gpus: [{gpu: h100-80g, layouts: [{tp: 2, throughput: {2: 3e9}}]}]"
    )
    assert [(one.gpu, one.layouts[0].throughput) for one in given.gpus] == [("h100-80g", {"2": 3 * 10**9})]
    for gpus, told in (
        ("[{gpu: h100-80g}, {gpu: h100-80g}]", "given twice"),
        ("[{gpu: ''}]", "is empty"),
        ("[{gpu: A 100}]", "gpu"),
        ("[{gpu: h100-80g, layouts: [{throughput: {9: 1}}]}]", "1 to max_workers"),
        ("[{gpu: h100-80g, layouts: [{micro_batch: -2}]}]", "micro_batch"),
    ):
        with pytest.raises(TaskFileError, match=told):
            loads(f"name: t\nmax_workers: 4\ngpus: {gpus}")


def test_throughput_model_fills_in_further_types() -> None:
    """Faster where the GPU is, and 0 where the model finds no room."""
    text = "name: t\ntp: 4\npp: 1\nlayouts: fixed\nmin_workers: 4\nmax_workers: 64\nmicro_batch: 1\nnumerics: follow\n"
    spec = loads(text + "throughput_model: {model: gpt3-7b, gpu: a100-80g, also: [h100-80g, a100-40g]}")
    fast, small = spec.gpus
    assert (fast.gpu, small.gpu) == ("h100-80g", "a100-40g")
    (layout,) = fast.layouts
    assert (layout.tp, layout.pp) == (4, 1)
    assert layout.throughput["64"] > 1.5 * spec.throughput["64"]
    assert set(small.layouts[0].throughput) <= set(spec.throughput) | {"4"}
    with pytest.raises(TaskFileError, match="unknown 'h100-90g'"):
        loads(text + "throughput_model: {model: gpt3-7b, gpu: a100-80g, also: [h100-90g]}")
    tight = text.replace("tp: 4", "tp: 1").replace("min_workers: 4", "min_workers: 1")
    one = loads(tight + "throughput_model: {model: gpt3-7b, gpu: h200-141g, also: [a100-40g]}")
    assert one.gpus[0].layouts[0].throughput == {"1": 0}


def test_preset_layouts_are_best_on_any_type() -> None:
    """What one GPU of the main type holds is cut among several of the other, and nowhere faster on the main one."""
    text = "name: t\nmin_workers: 1\nmax_workers: 64\nmicro_batch: 1\nnumerics: follow\n"
    model = "throughput_model: {model: gpt3-7b, gpu: h200-141g"
    alone, both = loads(text + model + "}"), loads(text + model + ", also: [a100-40g]}")
    cuts = [{(one.tp, one.pp) for one in spec.layouts} | {(spec.tp, spec.pp)} for spec in (alone, both)]
    further = cuts[1] - cuts[0]
    assert cuts[0] < cuts[1]
    assert (both.tp, both.pp, both.throughput, both.min_workers) == (
        alone.tp, alone.pp, alone.throughput, alone.min_workers,
    )  # fmt: skip
    (other,) = both.gpus
    tables = {(one.tp, one.pp): one.throughput for one in other.layouts}
    assert set(tables) == cuts[1]
    assert all(any(tables[cut].values()) for cut in further)
    best = {n: max(table.get(n, 0) for table in tables.values()) for table in tables.values() for n in table}
    assert any(best[n] > max(tables[cut].get(n, 0) for cut in cuts[0]) for n in best), "faster with them"


def test_layout_without_room_on_main_type_gives_zero_there() -> None:
    text = "name: t\ntp: 8\npp: 1\nlayouts: [{tp: [1, 8]}]\nmin_workers: 8\nmax_workers: 16\nmicro_batch: 1\n"
    text += "numerics: follow\n"
    spec = loads(text + "throughput_model: {model: gpt3-7b, gpu: a100-40g, also: [h200-141g]}")
    main = {(one.tp, one.pp): one.throughput for one in spec.layouts}
    there = {(one.tp, one.pp): one.throughput for one in spec.gpus[0].layouts}
    assert main[1, 1] == {"1": 0} and any(main[8, 1].values())
    assert any(there[1, 1].values())
