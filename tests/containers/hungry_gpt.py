"""A task's entry for tests: trains without haste, for tests beside others, and eats memory without end once
DIRECTORY/<host name> is there. Argument: the directory."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.process import context

_REST_S = 0.2


def eat(order: Path) -> None:
    while not order.exists():
        time.sleep(0.1)
    order.unlink()
    eaten = []
    while True:
        eaten.append(b"x" * (8 << 20))


def slowly(*arguments: Any) -> tuple[float, int]:
    time.sleep(_REST_S)
    return _plain(*arguments)


if __name__ == "__main__":
    _plain = pretrain_gpt.forward_backward
    pretrain_gpt.forward_backward = slowly
    threading.Thread(target=eat, args=(Path(sys.argv[1]) / socket.gethostname(),), daemon=True).start()
    pretrain_gpt.main(context.current().launch.spec)
