"""`entry: megatron-lm`: the first of `args` is a script that ends in `megatron.training.pretrain(...)`, one of the
checkout of Megatron-LM that `cwd` names or one's own; the others are its flags, unchanged.

Rules
-----
* The script runs as it is, in a world of one replica, which is up already. What Megatron does over data-parallel ranks
  is the hook's (`adapter.py`).
* The fork server has imported Megatron-core. A checkout that holds another version of it would run with the wrong one,
  so that is refused.
* A script that ends well has trained to the end, or as far as it was stopped; then the last iteration is committed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from unicrond.agents.trainer.megatron import cpu, seams
from unicrond.agents.trainer.megatron.adapter import Adapter
from unicrond.agents.trainer.process import context
from unicrond.events.vocabulary import TaskSpec


class NoCheckout(SystemExit):
    """There is no Megatron-LM where the task says, or it cannot be used here; the text says why, in one line."""


def main(spec: TaskSpec) -> None:
    """Run the script to its end. Raises SystemExit where it ends so."""
    script = Path(spec.args[0])
    if not script.is_file():
        raise NoCheckout(f"args: no script {script} in {Path.cwd()}; cwd must be a checkout of Megatron-LM")
    sys.argv = list(spec.args)
    for place in dict.fromkeys((Path.cwd(), script.resolve().parent)):  # a script of one's own lies where it likes
        sys.path.insert(0, str(place))
        _same_core(place)
    process = context.current()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu.apply()
    os.environ.update(RANK=str(process.launch.shard), WORLD_SIZE=str(spec.replica_workers), LOCAL_RANK="0")
    modules = _modules()
    seams.require(modules)
    adapter = Adapter(process, modules, on_gpu=on_gpu)
    if not on_gpu:
        cpu.apply_after_import()
        adapter.log("no GPU here: Megatron-LM runs on the CPU, with what it asks of CUDA redirected")
    if warning := seams.warning(seams.version(modules)):
        adapter.log(warning)
    adapter.install()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    adapter.finish()


def _modules() -> dict[str, Any]:
    """Return the modules of `megatron.training`, by name. Raises NoCheckout."""
    modules: dict[str, Any] = {"core": importlib.import_module("megatron.core")}
    try:
        for name in ("arguments", "initialize", "global_vars", "training"):
            modules[name] = importlib.import_module(f"megatron.training.{name}")
    except ImportError as error:
        raise NoCheckout(
            f"megatron.training: {error}; cwd must be a checkout of Megatron-LM, and the node must have its packages"
        ) from None
    return modules


def _same_core(checkout: Path) -> None:
    """Raise NoCheckout where the checkout's Megatron-core is another version than the one that is imported."""
    package_info = checkout / "megatron" / "core" / "package_info.py"
    if not package_info.is_file():
        return
    core = importlib.import_module("megatron.core")
    if Path(core.__file__ or "").resolve().is_relative_to(checkout):
        return
    specification = importlib.util.spec_from_file_location("_package_info", package_info)
    assert specification is not None and specification.loader is not None
    package = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(package)
    if getattr(package, "__version__", "") != core.__version__:
        raise NoCheckout(
            f"cwd: the checkout has Megatron-core {package.__version__}, this node has imported {core.__version__};"
            f" start its agent with PYTHONPATH={checkout}, or install megatron-core=={package.__version__}"
        )
