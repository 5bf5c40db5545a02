"""A task's entry for tests: trains as `traced_gpt.py` does, and something goes wrong in it whenever the test says so.

    entry: tests/integration/disobedient_gpt.py
    args: [DIRECTORY]

`DIRECTORY/<worker>` is an order for that worker: it is taken, once, at the worker's next micro-batch.
`DIRECTORY/<node>` is one for whoever trains on that node, as long as it lies there: at every micro-batch, those about
connections in every reduction. An order is a JSON list (`order` writes it); what was obeyed is added to
`DIRECTORY/<worker>.obeyed`, as ORDER ITERATION.

    ["raise", TEXT]     a RuntimeError with that text in the forward step
    ["data", TEXT]      an EOFError while a sample is read
    ["flip"]            one bit of one parameter is another
    ["reset"]           in the middle of the reduction all connections of the worker's group are reset (RST)
    ["silence"]         in the middle of the reduction they fall silent: nothing arrives there any more, not even an ACK
    ["part"]            when all iterations are done, before the last state is put together from its parts (sharded
                        optimizers), all connections of the worker's group are reset
    ["die"]             the process ends before it is ready (a node's order only)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 6
_DIED = 9


def order(directory: Path, who: str, *words: str) -> None:
    """Have `who`, a worker or a node, obey from its next micro-batch on."""
    path = directory / f"{who}.new"
    path.write_text(json.dumps(words))
    path.rename(directory / who)


class Orders:
    """Those for this worker."""

    def __init__(self, directory: Path, worker: str, node: str) -> None:
        self._directory = directory
        self._worker = worker
        self._node = node

    def own(self) -> list[str]:
        """The words of the worker's order, taken; [] if none lies there."""
        path = self._directory / self._worker
        words = self._read(path)
        if words:
            path.unlink()
        return words

    def standing(self) -> list[str]:
        """The words of the node's order; [] if none lies there."""
        return self._read(self._directory / self._node)

    def obeyed(self, what: str, iteration: int) -> None:
        with (self._directory / f"{self._worker}.obeyed").open("a") as told:
            print(what, iteration, file=told)

    @staticmethod
    def _read(path: Path) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return list(json.loads(path.read_text()))
        return []


def reset(descriptor: int) -> None:
    """Reset a TCP connection: the peer gets RST. (To connect to no family at all is to disconnect.)"""
    ctypes.CDLL(None).connect(descriptor, struct.pack("H14x", socket.AF_UNSPEC), 16)


def silence(descriptor: int) -> None:
    """From now on whatever arrives for this connection is dropped by the kernel, as by a network that has failed."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        filtered = struct.pack("HP", 1, ctypes.addressof(program))
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)


LINKS = {"reset": reset, "silence": silence}


def main() -> None:
    from unicrond.agents.trainer.process import context

    launch = context.current().launch
    orders = Orders(Path(sys.argv[1]), launch.worker, launch.node)
    if orders.own() == ["die"]:
        os._exit(_DIED)

    import torch
    import traced_gpt

    from unicrond.agents.trainer.lifecycle.effects import Assemble
    from unicrond.agents.trainer.loop import pretrain_gpt
    from unicrond.agents.trainer.loop.handlers import HANDLERS

    plain = pretrain_gpt.forward_backward
    waiting: list[str] = []

    def forward_backward(
        spec: Any, model: torch.nn.Module, text: Any, step: Any, micro_batches: list[int]
    ) -> tuple[float, int]:
        step._hook._driver.reduction.on_start = lambda: break_links(step)
        for words in (orders.own(), orders.standing()):
            if words:
                obey(words, model, step)
        return plain(spec, model, text, step, micro_batches)

    def obey(words: list[str], model: torch.nn.Module, step: Any) -> None:
        if words[0] in LINKS:
            waiting[:] = words
            return
        if words[0] != "part":
            orders.obeyed(words[0], step.iteration)
        match words:
            case ["raise", text]:
                raise RuntimeError(text)
            case ["data", text]:
                with step.loading():
                    raise EOFError(text)
            case ["part"]:
                part()
            case ["flip"]:
                with torch.no_grad():
                    next(model.parameters()).view(torch.int32).view(-1)[0] ^= 1

    def part() -> None:
        """Break the links of the group that assembles the last state, once."""
        plainly = HANDLERS[Assemble]

        def assemble(driver: Any, effect: Assemble) -> Any:
            iteration = driver.member.ledger.iteration
            if iteration > launch.spec.iterations:
                HANDLERS[Assemble] = plainly
                orders.obeyed("part", iteration)
                for descriptor in driver.group._formed.sockets:
                    reset(descriptor)
            return plainly(driver, effect)

        HANDLERS[Assemble] = assemble

    def break_links(step: Any) -> None:
        """A bucket of the iteration is on its way: the first, and others are to follow."""
        words, formed = list(waiting) or orders.standing(), step._hook._driver.group._formed
        if formed is None:  # it is alone
            return
        if words and words[0] in LINKS and step._hook._driver.reduction.started == 1:
            waiting.clear()
            orders.obeyed(words[0], step.iteration)
            for descriptor in formed.sockets:
                LINKS[words[0]](descriptor)

    pretrain_gpt.forward_backward = forward_backward
    traced_gpt.main()


if __name__ == "__main__":
    main()
