"""A name submitted again: what is compared, what is refused, what is said before it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import serving
from unicrond.core.state.changes import with_task
from unicrond.core.state.task_parts import Copies, KeptState
from unicrond.core.tasks.resubmission import Resubmission, resubmission
from unicrond.core.tasks.task_rules import spec_faults
from unicrond.ctl.main import main
from unicrond.events import vocabulary as v
from unicrond.events.megatron.training_settings import differences, refusal, settings_of
from unicrond.events.vocabulary import CheckpointSpec, LayoutSpec, OptimizerSpec, TaskSpec, TaskStart
from unicrond.intake.task_file import TaskFileError, loads

GPT = TaskSpec(name="big", max_workers=2, iterations=30)
SCRIPT = TaskSpec(name="big", entry="/lm/train.py", args=("big.json", "--lr", "1e-3", "--shuffle", "--betas=0.9"))
FLAGS = (
    "x.py --num-layers 4 --seed 7 --global-batch-size 16 --train-iters 500 --lr-decay-iters 500 --load /ckpt"
    " --split 90,5,5 --data-path /data/a --lr 1e-4 --save-interval 100 --eval-iters 10"
)
MEGATRON = TaskSpec(name="big", entry="megatron-lm", args=tuple(FLAGS.split()), seed=7, global_batch=16, iterations=500)

CKPT = replace(GPT, iterations=10**6, checkpoint=CheckpointSpec(dir="/ckpt"))
HELD = KeptState(node="n1", shard=0, iteration=5, generation=1, origin="n1", size_bytes=1)

settings = st.dictionaries(st.sampled_from("abcd"), st.text(max_size=80), max_size=4)


def flags(**changes: str) -> tuple[str, ...]:
    text = FLAGS
    for before, after in changes.items():
        text = text.replace("--" + before.replace("_", "-") + " ", "--" + before.replace("_", "-") + " " + after + ",")
    return tuple(text.split())


def script(args: str) -> TaskSpec:
    return replace(SCRIPT, args=tuple(args.split()))


def changes(before: TaskSpec, now: TaskSpec) -> list[str]:
    return [text.partition(":")[0] for text in differences(settings_of(before), settings_of(now))]


# --- the comparison ----------------------------------------------------------------------------------


@given(settings, settings)
def test_differences_are_what_differs(before: dict[str, str], now: dict[str, str]) -> None:
    names = {text.partition(":")[0] for text in differences(before, now)}
    assert names == {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    assert differences(before, before) == []
    back = {text.partition(":")[0] for text in differences(now, before)}
    assert back == names


@given(settings, settings)
def test_refusal_is_one_sentence(before: dict[str, str], now: dict[str, str]) -> None:
    sentence = refusal("big", differences(before, now))
    assert sentence.isprintable() and all(flag in sentence for flag in ("--resume", "--restart", "--fork NAME"))
    assert len(sentence) < 1000


@given(
    iterations=st.integers(1, 10**6), workers=st.integers(1, 64), weight=st.floats(0.1, 9),
    micro_batch=st.integers(1, 4), interval=st.none() | st.integers(0, 9),
    env=st.dictionaries(st.sampled_from("AB"), st.text()),
    spec=st.sampled_from([replace(GPT, optimizer=OptimizerSpec(decay_iterations=9)), SCRIPT, MEGATRON]),
)  # fmt: skip
def test_what_trains_nothing_else_may_differ(
    spec: TaskSpec, iterations: int, workers: int, weight: float, micro_batch: int, interval: int | None,
    env: dict[str, str],
) -> None:  # fmt: skip
    other = replace(
        spec,
        iterations=iterations,
        max_workers=workers,
        weight=weight,
        micro_batch=micro_batch,
        tp=2,
        layouts=(LayoutSpec(tp=2),),
        checkpoint=replace(spec.checkpoint, interval=interval),
        env=env,
        start=TaskStart(mode="resume", run_id="x"),
    )
    assert changes(spec, other) == []


@pytest.mark.parametrize(
    ("before", "now", "names"),
    [
        (GPT, replace(GPT, seed=7, data="/d"), ["seed", "data"]),
        (GPT, replace(GPT, global_batch=16), ["global_batch"]),
        (GPT, replace(GPT, optimizer=OptimizerSpec(lr=0.1)), ["optimizer.lr"]),
        (GPT, replace(GPT, optimizer=OptimizerSpec(distributed=True)), []),
        (GPT, replace(GPT, model=replace(GPT.model, dropout=0.1)), ["model.dropout"]),
        (GPT, replace(GPT, iterations=60), ["optimizer.decay_iterations"]),
        (SCRIPT, replace(SCRIPT, entry="/lm/other.py"), ["entry"]),
        (SCRIPT, replace(SCRIPT, args=("big.json", "--lr=1e-3", "--shuffle", "--betas", "0.9")), []),
        (script("--data a --data b"), script("--data c --data b"), ["--data"]),
        (script("--data a --data b"), script("--data=a --data=b"), []),
        (script("--data a --data b"), script("--data a b"), ["--data"]),
        (script("--fast"), script("--fast --fast"), ["--fast"]),
        (replace(MEGATRON, args=tuple(f"{FLAGS} --lr 1e-4".split())), MEGATRON, []),
        (replace(MEGATRON, args=tuple(f"{FLAGS} --lr 0.1".split())), MEGATRON, ["--lr"]),
        (SCRIPT, replace(SCRIPT, entry="/elsewhere/train.py", optimizer=OptimizerSpec(lr=0.1)), []),
        (SCRIPT, replace(SCRIPT, args=("small.json", "--lr", "1e-4")), ["args", "--lr", "--shuffle", "--betas"]),
        (MEGATRON, replace(MEGATRON, seed=8, args=flags(seed="8")), ["--seed"]),
        (MEGATRON, replace(MEGATRON, args=flags(split="80")), ["--split"]),
        (MEGATRON, replace(MEGATRON, args=flags(load="/other")), ["--load"]),
        (MEGATRON, replace(MEGATRON, args=(*MEGATRON.args, "--ckpt-step", "10")), ["--ckpt-step"]),
        (MEGATRON, replace(MEGATRON, args=flags(save_interval="7", eval_iters="7")), []),
        (
            replace(MEGATRON, args=tuple(FLAGS.replace("--lr-decay-iters 500", "").split())),
            replace(MEGATRON, iterations=900, args=tuple(FLAGS.replace("--lr-decay-iters 500", "").split())),
            ["--lr-decay-iters"],
        ),
    ],
)
def test_settings_that_decide_what_is_trained_differ_by_name(before: TaskSpec, now: TaskSpec, names: list[str]) -> None:
    assert sorted(changes(before, now)) == sorted(names)


@pytest.mark.parametrize(
    "secret",
    [
        ("--hf-token", "S3cret"), ("--hf-token=S3cret",), ("-token", "S3cret"), ("--api_key", "-S3cret"),
        ("--store", "https://u:S3cret@host/x"), ("--extra=password:S3cret",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("task", [SCRIPT, MEGATRON, replace(MEGATRON, args=())], ids=["script", "megatron", "bad"])
def test_settings_hold_no_secrets(task: TaskSpec, secret: tuple[str, ...]) -> None:
    """They are written beside each state, and a secret that was changed trains nothing else."""
    before = replace(task, args=(*task.args, *secret, "--shuffle-more", "1"))
    assert "S3cret" not in str(settings_of(before))
    after = replace(before, args=tuple(word.replace("S3cret", "Another") for word in before.args))
    assert changes(before, after) == []
    other = replace(before, args=(*before.args[:-1], "2"))
    assert len(changes(before, other)) == 1, "what stands behind it counts"


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_field_that_is_added_refuses_no_state_of_before(part: str) -> None:
    """Nor does a state that says the default refuse a version that leaves it out, or does not know the field."""
    default = str(getattr(getattr(GPT, part), field := {"model": "dropout", "optimizer": "clip_grad"}[part]))
    new = settings_of(replace(GPT, **{part: replace(getattr(GPT, part), **{field: 0.5})}))
    old = settings_of(GPT)
    assert f"{part}.{field}" not in old
    assert differences(old, {**old, f"{part}.{field}": default}) == []
    assert differences({**old, f"{part}.{field}": default}, old) == []
    assert differences(old, new) == [f"{part}.{field}: {default} before, 0.5 now"]


def test_refusal_tells_values_apart_that_differ_in_control_characters() -> None:
    before, now = ({"--prompt\n": value} for value in ("a\tb", "a\nb"))
    assert refusal("big", differences(before, now)).count(r"--prompt: 'a\tb' before, 'a\nb' now") == 1


def test_long_values_are_cut() -> None:
    (text,) = differences({"--data-path": "x" * 500}, {})
    assert text == f"--data-path: {'x' * 60}... before, not given now"


# --- the head ----------------------------------------------------------------------------------------


def ended(*, saved: int = 5) -> MiniCluster:
    """One task that has trained, saved its state after that iteration, and been cancelled."""
    cluster = MiniCluster(seed=7)
    for number in (1, 2):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.train("big", 5)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert task.membership is not None
    leader = task.membership.members[0]
    if saved:
        about = {"node": leader.node, "task": "big", "worker": leader.worker}
        event = v.CheckpointSaved(**about, iteration=saved, path="/c", size_bytes=1, duration_us=1)
        cluster.say(cluster.hosts[leader.node], event)
    cluster.append(v.TaskCancelled(task="big", reason="a slip"), "api", 1)
    cluster.run()
    assert cluster.state.tasks["big"].at_rest
    return cluster


def test_outlook_says_where_task_goes_on() -> None:
    state = ended().state
    spec = state.tasks["big"].spec
    start = TaskStart(run_id="r")
    same = resubmission(state, replace(spec, max_workers=1), start)
    assert same.problem == "" and same.outlook.endswith("the last run of its name, after iteration 5 or later")
    done = resubmission(state, replace(spec, iterations=5), start)
    assert "optimizer.decay_iterations" in done.problem
    done = resubmission(state, replace(spec, iterations=5), replace(start, mode="resume"))
    assert "with other settings" in done.outlook and "nothing is left to train" in done.outlook
    assert resubmission(state, replace(spec, name="new"), start) == Resubmission()
    resume = resubmission(state, replace(CKPT, name="new"), replace(start, mode="resume"))
    assert resume.outlook.endswith("from the newest state in /ckpt, whatever that was made with")
    other = replace(spec, seed=9, global_batch=16, data="/d", model=replace(spec.model, dropout=0.1))
    resume = resubmission(state, other, replace(start, mode="resume"))
    assert resume.outlook.count(" before, ") == 3 and "and 1 more)" in resume.outlook


@pytest.mark.parametrize("saved", [0, 5])
@pytest.mark.parametrize("name", ["big", "new"])
def test_restart_says_what_becomes_of_states_it_may_find(saved: int, name: str) -> None:
    """Also where the log knows of none: another log's may lie there."""
    restart = resubmission(ended(saved=saved).state, replace(CKPT, name=name), TaskStart(run_id="r", mode="restart"))
    begins = "it begins from its seed, or from what its program loads"
    assert restart == ("", f"{begins}; what /ckpt holds of earlier runs is kept in /ckpt/before-r", ())


def test_outlook_says_that_states_are_looked_for_elsewhere() -> None:
    state = ended().state
    task = state.tasks["big"]
    now = replace(task.spec, checkpoint=CheckpointSpec(dir="/new"))
    state = with_task(state, replace(task, spec=replace(task.spec, checkpoint=CheckpointSpec(dir="/old"))))
    start = TaskStart(run_id="r")
    held = replace(task, copies=Copies(holdings={"n1/0": HELD}))
    held_state = with_task(state, replace(held, spec=state.tasks["big"].spec))
    assert resubmission(state, now, start).outlook == (
        "it looks for states in /new, not in /old, the checkpoint.dir of its last run"
    )
    assert "in /new and in the memory of its nodes, not in /old" in resubmission(held_state, now, start).outlook
    same = replace(now, checkpoint=CheckpointSpec(dir="/x/../old/"))
    assert "goes on from the newest state" in resubmission(state, same, start).outlook
    other = replace(now, seed=9)
    assert resubmission(state, other, start) == resubmission(state, now, start)._replace(continues=())
    assert "seed" in resubmission(held_state, other, start).problem
    assert (
        "nothing is left" not in resubmission(state, replace(now, iterations=5), replace(start, mode="resume")).outlook
    )


def test_run_takes_states_of_runs_that_the_head_has_compared() -> None:
    cluster = ended()
    task = cluster.state.tasks["big"]
    spec = replace(task.spec, start=TaskStart(run_id="b", continues=("a",)))
    state = with_task(cluster.state, replace(task, spec=spec))
    other = replace(spec, seed=9)
    assert resubmission(state, spec, TaskStart(run_id="c")).continues == ("b", "a")
    assert resubmission(state, other, TaskStart(run_id="c", mode="resume")).continues == ("b", "a")
    for mode, now in (("restart", spec), ("fork", replace(spec, name="fork"))):
        start = TaskStart(run_id="c", mode=mode, source="big" if mode == "fork" else "")
        assert resubmission(state, now, start).continues == ()
    unsaved = replace(task, spec=spec, progress=replace(task.progress, checkpoint_iteration=0), copies=Copies())
    state = with_task(state, unsaved)
    assert resubmission(state, spec, TaskStart(run_id="c")).continues == ("b", "a")
    assert resubmission(state, other, TaskStart(run_id="c")).continues == (), "not the settings of the last run"
    long = replace(spec, start=TaskStart(run_id="b", continues=tuple(map(str, range(20)))))
    state = with_task(state, replace(unsaved, spec=long))
    assert len(resubmission(state, long, TaskStart(run_id="c")).continues) == 16


def test_task_without_states_may_be_anything() -> None:
    state = ended(saved=0).state
    outcome = resubmission(state, replace(state.tasks["big"].spec, seed=9), TaskStart(run_id="r"))
    assert outcome == ("", "its last run has saved no state: it begins as if that had not been", ())


def test_directory_of_task_that_trains_is_no_others() -> None:
    cluster = ended()
    cluster.submit("small", checkpoint=CheckpointSpec(dir="/ckpt/small"))
    spec, start = replace(GPT, name="new", checkpoint=CheckpointSpec(dir="/ckpt/x/..//small/")), TaskStart(run_id="r")
    sentence = "checkpoint.dir: /ckpt/x/..//small/ is that of task small, which trains; give another directory"
    assert resubmission(cluster.state, spec, start).problem == sentence
    cluster.append(v.TaskCancelled(task="small", reason=""), "api", 1)
    cluster.run()
    assert resubmission(cluster.state, spec, start).problem == ""


def test_fork_into_directory_of_its_source_is_refused() -> None:
    start = TaskStart(mode="fork", run_id="r", source="big", source_dir="/ckpt/big")
    for directory, is_refused in (("/ckpt/big", True), ("/ckpt/./big/", True), ("/ckpt/big-2", False)):
        fork = replace(GPT, name="fork", checkpoint=CheckpointSpec(dir=directory), start=start)
        assert [fault.place for fault in spec_faults(fork)] == [("checkpoint", "dir")] * is_refused


def test_fork_needs_a_state() -> None:
    state = ended().state
    spec = replace(state.tasks["big"].spec, name="fork")
    start = TaskStart(mode="fork", run_id="r", source="big", source_dir="/c")
    assert resubmission(state, spec, start).outlook.endswith("task big in /c, after iteration 5 or later")
    assert resubmission(state, spec, replace(start, source="gone")).outlook.endswith("of task gone in /c")
    assert "; nothing is left to train" in resubmission(state, replace(spec, iterations=5), start).outlook
    assert resubmission(ended(saved=0).state, spec, start).outlook.endswith(
        "newest state of task big in /c, which that has reported none in yet: without one the fork fails"
    )
    new = MiniCluster(seed=1)
    new.submit("big", max_workers=2)
    assert "has saved no state yet" in resubmission(new.state, spec, start).problem
    task = new.state.tasks["big"]
    resumed = with_task(new.state, replace(task, spec=replace(task.spec, start=TaskStart(continues=("b",)))))
    assert resubmission(resumed, spec, start).problem == "", "those of the runs before may lie there"


def test_fork_of_name_that_was_used_says_what_becomes_of_its_states() -> None:
    cluster = ended()
    task = cluster.state.tasks["big"]
    state = with_task(cluster.state, replace(task, spec=replace(task.spec, name="fork")))
    start = TaskStart(mode="fork", run_id="r", source="big", source_dir="/c")
    fork = resubmission(state, replace(CKPT, name="fork"), start)
    assert fork.outlook.endswith("or later; what /ckpt holds of earlier runs is kept in /ckpt/before-r")
    assert "earlier runs" not in resubmission(cluster.state, replace(CKPT, name="fork"), start).outlook


@pytest.mark.parametrize(
    ("save", "cwd", "is_refused"),
    [
        ("/save/big", "", True), ("/save/./x/../big/", "", True), ("big", "/save", True), ("/save/big-2", "", False),
        ("", "/save/big", False),
    ],
)  # fmt: skip
def test_fork_does_not_save_where_its_source_does(save: str, cwd: str, *, is_refused: bool) -> None:
    """Of Megatron-LM: each would overwrite the other's own checkpoints."""
    state = ended().state
    task = state.tasks["big"]
    state = with_task(state, replace(task, spec=replace(MEGATRON, args=(*MEGATRON.args, "--save", "/save/big"))))
    args = (*MEGATRON.args, "--save", save) if save else MEGATRON.args
    fork = replace(MEGATRON, name="fork", cwd=cwd, args=args)
    start = TaskStart(mode="fork", run_id="r", source="big", source_dir="/c")
    problem = resubmission(state, fork, start).problem
    assert problem.startswith("args: --save names the directory of task big (/save/big)") == is_refused, problem
    assert bool(problem) == is_refused
    assert resubmission(state, fork, replace(start, source="gone")).problem == ""
    without_flags = with_task(state, replace(task, spec=replace(MEGATRON, args=())))
    assert resubmission(without_flags, fork, start).problem == ""


async def answer(http: aiohttp.ClientSession, status: int, **body: Any) -> str:
    async with http.post("/v1/tasks", json={"max_workers": 2, "numerics": "follow", **body}) as response:
        text = await response.text()
        assert response.status == status, text
        return text


async def test_api_refuses_other_settings_until_told(tmp_path: Path) -> None:
    cluster = ended()
    spec = cluster.state.tasks["big"].spec
    file: dict[str, Any] = {"name": "big", "iterations": spec.iterations, "seed": 7}
    async with serving(tmp_path, cluster.log) as served, aiohttp.ClientSession(served.url) as http:
        refusal = await answer(http, 409, **file)
        assert "seed: 1234 before, 7 now" in refusal and "--fork NAME" in refusal
        fork = {"mode": "fork", "source": "big", "continues": ["forged"], "is_changed": True}
        assert "start.source" in await answer(http, 400, **file, start={"mode": "fork"})
        assert "start.source" in await answer(http, 400, **file, start=fork)
        outlook = await answer(http, 201, **{**file, "name": "other"}, start=fork)
        assert "newest state of task big" in outlook
        assert "with other settings" in await answer(http, 201, **file, start={"mode": "resume"})
        await served.until(v.TaskSubmitted, after=len(cluster.log) + 1)
        tasks = served.coordinator.state.tasks
        start = tasks["other"].spec.start
        assert start is not None and (start.source, Path(start.source_dir).name) == ("big", "big")
        assert (start.continues, start.is_changed) == ((), False), "only the head says so"
        again = tasks["big"].spec.start
        assert again is not None and again.mode == "resume" and again.run_id not in ("", start.run_id)


# --- the command -------------------------------------------------------------------------------------


def test_task_file_does_not_say_how_it_begins() -> None:
    with pytest.raises(TaskFileError, match="task file:2: start: say it with the order"):
        loads("name: big\nstart: {mode: restart}\n")


@pytest.mark.parametrize("directory", ["/", "/ckpt", "/ckpt/", "/ckpt/../x", "'s3://bucket'", "'s3://bucket/'"])
def test_fork_has_no_place_beside_directory_of_the_root(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(f"name: big\ncheckpoint: {{dir: {directory}}}\n")
    assert main(["submit", str(path), "--fork", "new"]) == 2
    assert "checkpoint.dir: a fork keeps its states beside those of task big" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "start"),
    [
        ([], "big", None),
        (["--resume"], "big", {"mode": "resume"}),
        (["--restart"], "big", {"mode": "restart"}),
        (["--fork", "new"], "new", {"mode": "fork", "source": "big", "source_dir": "/ckpt/big"}),
    ],
)
def test_submit_sends_how_task_begins(
    words: list[str], name: str, start: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sent: list[dict[str, Any]] = []

    def post(_: object, spec: dict[str, Any]) -> dict[str, Any]:
        sent.append(spec)
        return {"task": spec["name"], "seq": 5, "outlook": "it begins"}

    monkeypatch.setattr("unicrond.ctl.client.Client.submit", post)
    path = tmp_path / "big.yaml"
    path.write_text("name: big\ncheckpoint: {dir: /ckpt/big}\n")
    assert main(["submit", str(path), *words]) == 0
    (spec,) = sent
    assert (spec["name"], spec.get("start")) == (name, start)
    assert spec["checkpoint"]["dir"] == f"/ckpt/{name}"
    assert capsys.readouterr().out == f"task {name} submitted, at sequence 5; it begins\n"
