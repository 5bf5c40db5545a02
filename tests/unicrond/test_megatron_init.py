"""`unicronctl init-megatron`: a task file from what people have."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicrond.ctl.main import main
from unicrond.events.megatron.command_line import BadFlags
from unicrond.intake.megatron_init import BadScript, parse_script, parse_words, task_file
from unicrond.intake.task_file import loads

MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4"
    " --global-batch-size 256 --train-iters 1000"
)
SBATCH = r"""#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8

export CUDA_DEVICE_MAX_CONNECTIONS=1   # as Megatron asks for
export WANDB_API_KEY=secret
TP=2
CHECKPOINTS="/data/ckpt/gpt 345m"
cd /opt/Megatron-LM

GPT_ARGS=(
    --num-layers 24
    --hidden-size 1024   # wide
    --num-attention-heads 16
    --seq-length 2048
)
TRAIN="--micro-batch-size 4 --global-batch-size 256 \
       --train-iters 1000 --lr 1e-4"

srun torchrun --nproc-per-node 8 --nnodes 4 \
    pretrain_gpt.py "${GPT_ARGS[@]}" $TRAIN \
    --tensor-model-parallel-size ${TP} --save "$CHECKPOINTS" 2>&1 | tee log.txt
"""


def test_init_megatron_converts_batch_script() -> None:
    spec = loads(task_file(parse_script(SBATCH), base=Path("/home/me")))
    assert (spec.name, spec.entry, spec.cwd) == ("pretrain-gpt", "megatron-lm", "/opt/Megatron-LM")
    assert (spec.min_workers, spec.max_workers, spec.tp) == (2, 32, 2)
    assert (spec.global_batch, spec.micro_batch, spec.iterations) == (256, 4, 1000)
    assert spec.args[:3] == ("pretrain_gpt.py", "--num-layers", "24")
    assert spec.args[-2:] == ("--save", "/data/ckpt/gpt 345m")
    assert spec.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "WANDB_API_KEY" not in spec.env  # secrets do not belong in the log


def test_init_megatron_converts_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["torchrun", "--nproc-per-node", "2", "/opt/Megatron-LM/pretrain_gpt.py", *MODEL.split()]
    assert main(["init-megatron", "--task", "small", "--", *words]) == 0
    spec = loads(capsys.readouterr().out)
    assert (spec.name, spec.cwd, spec.max_workers) == ("small", "/opt/Megatron-LM", 2)
    assert spec.args == ("pretrain_gpt.py", *MODEL.split())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (SBATCH.replace("TP=2", ""), r"'\$\{TP\}' is known to a shell alone"),
        (SBATCH.replace("TP=2", "TP=$(cat tp)"), "is known to a shell alone"),
        ("echo hello\n", "no command with a .py script and one of --num-layers, --encoder-num-layers, "),
        (
            SBATCH.replace("--num-layers 24", "--use-checkpoint-args"),
            "--num-layers: is not given; unicrond needs to know",
        ),
    ],
)
def test_init_megatron_names_shell_expressions(script: str, reason: str) -> None:
    with pytest.raises((BadScript, BadFlags), match=reason):
        task_file(parse_script(script), base=Path("/home/me"))


def test_init_megatron_recognises_encoder_and_decoder() -> None:
    script = SBATCH.replace("--num-layers 24", "--encoder-num-layers 24 --decoder-num-layers 12")
    spec = loads(task_file(parse_script(script.replace("--seq-length", "--encoder-seq-length")), base=Path("/home/me")))
    assert (spec.model.layers, spec.model.seq, spec.max_workers) == (24, 2048, 32)


def test_init_megatron_refuses_launcher_without_script() -> None:
    with pytest.raises(BadScript, match=r"no word ends in \.py"):
        parse_words(["torchrun", "--nnodes", "2"])


def test_init_megatron_reports_bad_flag_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain_gpt.py", *MODEL.split(), "--hybrid-context-parallel"]
    assert main(["init-megatron", "--", *words]) == 2
    assert "--hybrid-context-parallel: sequences over various numbers of workers" in capsys.readouterr().err
