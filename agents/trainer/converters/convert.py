"""The command `unicronctl checkpoint`: in the portable form (`states/portable.py`), and in another format.

    unicronctl checkpoint convert SOURCE DESTINATION --to hf|torch-dist|portable

Rules
-----
* What the source is, its files say. A task's own checkpoint is joined first, as `checkpoint export` does.
* Tensors are read when they are written. What is joined first is in memory as a whole, and a file of safetensors.
* The destination is empty or new. It is written beside itself, and renamed when it is whole; what an error or Ctrl-C
  leaves is removed. (In an object store the manifest comes last.)
* One line on stderr says what is wrong, and where.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from unicrond.agents.trainer.converters import hugging_face, torch_dist
from unicrond.agents.trainer.converters.model_state import FIRST, ModelState, from_tree, to_tree, watch
from unicrond.agents.trainer.states import checkpoint, portable
from unicrond.agents.trainer.states.places import name_of
from unicrond.agents.trainer.states.resharding import SETTINGS, WHOLE
from unicrond.agents.trainer.states.state import BadState
from unicrond.agents.trainer.states.state_bytes import named_tensors
from unicrond.events.cli.command_line import Parser, add, fail, option, run
from unicrond.events.vocabulary.tasks import is_url

#: What each flag is for: a command, or a format.
_MEANT_FOR = {
    "--to": ("convert",), "--model-only": ("torch-dist", "portable"), "--task": ("import", "portable"),
    "--hf-config": ("hf",), "--vocab-size": ("hf",), "--pad-vocab": ("torch-dist", "portable"),
}  # fmt: skip


def convert(options: argparse.Namespace) -> dict[str, Any]:
    """Write the source into the destination; return what was written. Raises OSError, BadState."""
    config = _config(Path(options.hf_config)) if options.hf_config else None
    if is_url(options.destination) and options.to != "portable":
        raise BadState(f"{options.destination}: only portable checkpoints are written into an object store")
    with ExitStack() as stack:
        kind, model = _opened(options, stack)
        if options.model_only:
            model = model.alone()
        if not model.tensors:
            raise BadState("it has no tensors of a model")
        write = _WRITERS[options.to]
        path = write(watch(model), options, config)
    return {
        "from": kind,
        "to": options.to,
        "path": path,
        "iteration": model.iteration or (FIRST if options.to == "portable" else 0),
        "tensors": len(model.tensors),
        "parameters": sum(tensor.numel() for tensor in model.tensors.values()),
        "optimizer": model.tree is not None and options.to != "hf",
    }


def _config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"--hf-config {path}: {error}") from None


# --- sources -------------------------------------------------------------------------------------


def _opened(options: argparse.Namespace, stack: ExitStack) -> tuple[str, ModelState]:
    """Return which format the source has, and its state, readable until the stack is closed."""
    source = options.source.rstrip("/")
    if not is_url(source):
        path = Path(source)
        if not path.is_dir():
            raise BadState(f"{source} is not a directory")
        if (path / hugging_face.CONFIG).is_file():
            return "hf", hugging_face.load(path, options.pad_vocab or 1)
        if not (path / "manifest.json").is_file():
            return "torch-dist", torch_dist.load(path, model_only=options.model_only or options.to == "hf")
    manifest, (place, iteration) = checkpoint.manifest_of(source), checkpoint.split(source)
    stored = stack.enter_context(checkpoint.opened(place, manifest.task, iteration, 0))
    if WHOLE in stored.tree:
        return "portable", from_tree(stored.tree, stored.tensor)
    shards = [checkpoint.load(place, manifest.task, iteration, n)[0] for n in range(len(manifest.shards))]
    tree = {**portable.whole(shards), SETTINGS: portable.settings_of(source)}
    return "task", from_tree(tree, dict(named_tensors(tree)).__getitem__)


# --- destinations --------------------------------------------------------------------------------


def _to_hugging_face(model: ModelState, options: argparse.Namespace, config: dict[str, Any] | None) -> str:
    with _drafted(Path(options.destination)) as draft:
        hugging_face.save(draft, model, config, options.vocab_size)
    return str(options.destination)


def _to_torch_dist(model: ModelState, options: argparse.Namespace, config: dict[str, Any] | None) -> str:
    with _drafted(Path(options.destination)) as draft:
        torch_dist.save(draft, model)
    return str(options.destination)


def _to_portable(model: ModelState, options: argparse.Namespace, config: dict[str, Any] | None) -> str:
    tree, reader = to_tree(model)
    iteration = tree["iteration"]
    final = portable.require_new(options.destination, iteration)
    task = options.task or "converted"
    if is_url(options.destination):
        checkpoint.write(portable.job_of(options.destination, task, iteration), tree, content=reader)
        return final
    with _drafted(Path(final)) as draft:
        checkpoint.write(portable.job_of(str(draft), task, iteration), tree, content=reader)
        inner = draft / name_of(iteration)
        for path in list(inner.iterdir()):
            path.rename(draft / path.name)
        inner.rmdir()
    return final


_WRITERS = {"hf": _to_hugging_face, "torch-dist": _to_torch_dist, "portable": _to_portable}


@contextmanager
def _drafted(destination: Path) -> Iterator[Path]:
    """Enter with an empty directory beside the destination, which becomes it at a clean exit and is removed at any
    other. Raises BadState where something is there."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise BadState(f"{destination} is there and not empty; give another directory, or remove it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        draft.chmod(0o755)
        yield draft
        draft.rename(destination)  # onto an empty directory, if there is one
    except BaseException:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes, however often one is asked to end
        shutil.rmtree(draft, ignore_errors=True)
        signal.signal(signal.SIGINT, handler)
        raise


# --- the command ---------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Run the command as `unicronctl checkpoint` calls it, which has checked each word by itself; return the exit
    code."""
    parser = Parser(prog="unicronctl checkpoint")
    add(
        parser,
        option("what", None, None, choices=("export", "import", "convert")),
        *(option(name, None, None) for name in ("source", "destination")),
        *(option(flag, None, None, default="") for flag in ("--task", "--to", "--hf-config", "--model-only", "--json")),
        *(option(flag, None, None, default=0, type=int) for flag in ("--vocab-size", "--pad-vocab")),
    )
    options = parser.parse_args(words)
    if problem := _misused(options):
        parser.error(problem)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.*")
    return run("unicronctl", lambda: _carry_out(options))


def _misused(options: argparse.Namespace) -> str:
    """Return which flag means nothing here; "" for none."""
    to = options.to if options.what == "convert" else ""
    if options.what == "convert" and not to:
        return "--to: give the format, one of hf, torch-dist and portable"
    if options.what == "import" and not options.task:
        return "--task: name the one that is to begin from it"
    for flag, places in _MEANT_FOR.items():
        if getattr(options, flag[2:].replace("-", "_")) and not {options.what, to} & set(places):
            return f"{flag}: it is for {' and '.join(places)} alone; leave it out"
    return ""


def _carry_out(options: argparse.Namespace) -> int | None:
    try:
        if options.what == "export":
            result = {"path": portable.export_to(options.source, options.destination)}
        elif options.what == "import":
            result = {"path": portable.import_to(options.source, options.destination, options.task)}
        else:
            result = convert(options)
    except (OSError, BadState) as error:
        return fail("unicronctl", f"{options.source}: {error}")
    print(msgspec.json.encode(result).decode() if options.json else result["path"])
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
