"""`unicron-replay certify`: what a log proves of a task's training, and whether it still is the log that it was."""

from __future__ import annotations

import argparse
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import as_json, open_source, say
from unicrond.replay.reading.progress import with_bar
from unicrond.replay.reading.source import read
from unicrond.replay.views.run_certificate import RunCertificate

#: Of a file that is read as a certificate.
_MAX_BYTES = 64 * 1024 * 1024


class CertificateFile(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate as it is kept in a file. `links`: (iteration, link), the last of them of `last`."""

    task: str
    seed: int
    global_batch: int
    last: int
    iterations: int
    samples: int
    returns: int
    samples_checked: bool
    seq: int
    links: tuple[tuple[int, str], ...]


async def certify_command(options: argparse.Namespace) -> int:
    """Print what the log proves of the task. Exit code 1 where something speaks against it."""
    earlier = _earlier(options.against, options.task)
    proof = RunCertificate(options.task, options.dataset_size, earlier.links if earlier is not None else ())
    async with open_source(options) as source, aclosing(with_bar(read(source), "certifying")) as chunks:
        async for chunk in chunks:
            for entry in chunk.entries:
                proof.add(entry)
    if proof.spec is None:
        raise UsageError(f"TASK: the log has no submission of {options.task}; `unicron-replay state` names all tasks")
    certificate = _certificate(proof)
    if options.out is not None and proof.is_proven:
        options.out.write_text(json.dumps(msgspec.to_builtins(certificate), indent=1) + "\n")
    if options.json:
        say(as_json(_fields(proof, certificate)))
    else:
        _say(proof, options.against, options.out)
    return 0 if proof.is_proven else 1


def _certificate(proof: RunCertificate) -> CertificateFile:
    assert proof.spec is not None
    return CertificateFile(
        task=proof.task,
        seed=proof.spec.seed,
        global_batch=proof.spec.global_batch,
        last=proof.last,
        iterations=proof.iterations,
        samples=proof.samples,
        returns=proof.returns,
        samples_checked=proof.dataset_size is not None,
        seq=proof.seq,
        links=proof.links,
    )


def _earlier(path: Path | None, task: str) -> CertificateFile | None:
    """Return the certificate in the file. Raises UsageError."""
    if path is None:
        return None
    text = path.read_bytes()
    try:
        if len(text) > _MAX_BYTES:
            raise msgspec.ValidationError(f"{len(text)} bytes, more than {_MAX_BYTES}")
        certificate = msgspec.json.decode(text, type=CertificateFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"--against: {path} is no certificate of `unicron-replay certify --out`: {error}") from None
    if certificate.task != task:
        raise UsageError(f"--against: {path} is of task {certificate.task}, not of {task}")
    return certificate


def _fields(proof: RunCertificate, certificate: CertificateFile) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(certificate)
    return {
        **fields,
        "link": proof.link,
        "proven": proof.is_proven,
        "parting": proof.parting,
        "findings_count": proof.findings_count,
        "findings": [finding._asdict() for finding in proof.findings],
    }


def _say(proof: RunCertificate, against: Path | None, out: Path | None) -> None:
    assert proof.spec is not None
    samples = "their digests are those that the seed draws" if proof.dataset_size is not None else "counted alone"
    span = f"iterations 1 to {proof.last}, {proof.samples} samples ({samples})"
    say(f"task {proof.task}: {span}, up to entry {proof.seq}")
    if proof.returns:
        say(f"training went back to an earlier state {proof.returns} times; samples of then count each time")
    say(f"link {proof.link}")
    for finding in proof.findings:
        say(f"entry {finding.seq}, iteration {finding.iteration}: {finding.text}")
    if proof.findings_count > len(proof.findings):
        say(f"and {proof.findings_count - len(proof.findings)} more")
    if (parting := proof.parting) is not None:
        say(f"the log is another than that of {against}: changed between iterations {parting[0]} and {parting[1]}")
    elif against is not None:
        say(f"the log continues that of {against}")
    if not proof.is_proven:
        say("not proven" + (f"; {out} was not written" if out is not None else ""))
    elif proof.dataset_size is None:
        say("give --dataset-size (0 for an endless stream) to have the samples themselves checked")
