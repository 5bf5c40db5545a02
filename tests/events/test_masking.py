"""What looks like a secret is hidden, what a log of training says is not; bytes keep their length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.events.host.masking import PATTERN_MASK, PLACEHOLDER, Mask, is_secret_flag, needles, secrets_in, values_in

SECRETS = {
    "HF_TOKEN=hf_abcdefghijklmnopqrstu1": "HF_TOKEN=(hidden)",
    "401 for hf_abcdefghijklmnopqrstu1 at hub": "401 for (hidden) at hub",
    "postgres://u:hunter2@host/db": "postgres://u:(hidden)@host/db",
    "Authorization: Bearer abc123def456ghi789": "Authorization: Bearer (hidden)",
    "{'api_key': 'A1b2C3d4E5f6G7'}": "{'api_key': '(hidden)'}",
    "DB_PASSWORD: correct-horse, next": "DB_PASSWORD: (hidden), next",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nok": "(hidden)\nok",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-def!": "(hidden)!",
    "AKIAIOSFODNN7EXAMPLE.": "(hidden).",
    "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY": "(hidden)",
    "unicron_" + "aB3" * 14 + "x": "(hidden)",
}
HARMLESS = (
    "consumed_tokens=409600000 tokens: 12345678901234",
    "eos_token='<|endoftext|>' pad_token: [PAD] token_type: int",
    "tokenizer: GPT2BPETokenizer1234",
    "iteration 5/100 | loss 2.345e+00 | lr 1.0e-05 | 4.2 s",
    "unicron_results_of_run_2024 hf_checkpoint_conversion_v2 sk-learn-1.5",
    'File "/opt/train.py", line 12, in <module>: secret: x',
    "http://user@host/path see https://a.b/c:80/x@y",
    "big.7 takes micro-batch 12 of iteration 400; digest 0f3a9c1e2b4d5f60718293a4b5c6d7e8",
)


@pytest.mark.parametrize("text", SECRETS)
def test_mask_hides_text_that_looks_like_secret(text: str) -> None:
    assert PATTERN_MASK.text(text) == SECRETS[text]
    overwrite = PATTERN_MASK.overwrite(text.encode()).decode()
    assert len(overwrite) == len(text) and overwrite.count("\n") == text.count("\n")
    assert set(overwrite) - set(SECRETS[text]) <= {"*"}


@pytest.mark.parametrize("text", HARMLESS)
def test_mask_leaves_training_output(text: str) -> None:
    assert PATTERN_MASK.text(text) == text
    assert PATTERN_MASK.overwrite(text.encode()) == text.encode()


def test_mask_hides_known_value_and_each_of_its_lines() -> None:
    mask = Mask(["hunter2!", "abc", "line-one-x\nline-two-yy\n", "hunter2!extra"])
    assert mask.text("xhunter2!y hunter2!extra abc line-two-yy") == f"x{PLACEHOLDER}y {PLACEHOLDER} abc {PLACEHOLDER}"
    assert mask.overwrite(b"xhunter2!y\nabc") == b"x********y\nabc"
    assert needles(["", " \n", "abc"]) == set()


@given(st.binary(max_size=300), st.lists(st.text(max_size=12), max_size=4))
def test_mask_keeps_length_and_line_breaks(data: bytes, values: list[str]) -> None:
    overwrite = Mask(values).overwrite(data)
    assert len(overwrite) == len(data)
    assert [place for place, byte in enumerate(data) if byte == 10] == [
        place for place, byte in enumerate(overwrite) if byte == 10
    ]


def test_mask_finds_secret_variables() -> None:
    env = {"HF_TOKEN": "x", "PATH": "/bin", "DATA": "s3://u:p@host/x", "MONKEY": "1", "WANDB_API_KEY": "y", "PASS": "z"}
    assert secrets_in(env) == ["HF_TOKEN", "DATA", "WANDB_API_KEY", "PASS"]
    env = {"TOKENIZERS_PARALLELISM": "false-false", "TOKEN": "12345678", "KEY": "short", "SECRET": "long enough"}
    assert values_in(env) == ["long enough"]


@pytest.mark.parametrize(
    "piece", ["token=", "://a:b", "-----BEGIN PRIVATE KEY-----", "eyJaaaaaaaaaaaa.", "A1b2_", "password"]
)
def test_hostile_log_costs_mask_little(piece: str) -> None:
    data = (piece * (80_000 // len(piece))).encode()
    assert len(PATTERN_MASK.overwrite(data)) == len(data)  # the suite's time limit would tell


def test_flag_of_secret_is_known_by_its_name() -> None:
    assert all(map(is_secret_flag, ("--hf-token", "-token", "--API_KEY", "--db-password", "--s3_access-key")))
    assert not any(map(is_secret_flag, ("token", "--tokenizer", "--hf-token=x", "--tokens", "--key", "--hf-token ")))
