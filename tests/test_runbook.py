"""docs/operate/runbook.md: what it quotes is said by the code, and what the code complains of is in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from tests.house import nodes, sources
from unicrond.core.nodes import isolation
from unicrond.core.state.state import NodeStatus
from unicrond.events.vocabulary import ErrorKind

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operate" / "runbook.md").read_text()
#: The first cell of every row of a table.
SYMPTOMS = re.findall(r"^\| ((?!---)[^|]+) \|", TEXT, re.MULTILINE)
QUOTED = [quote for symptom in SYMPTOMS for quote in re.findall(r'"([^"]+)"', symptom)]
#: What a daemon says when it cannot do something, beside what it raises.
COMPLAINTS = {"log.error", "log.critical", "logger.error", "logger.critical", "Fatal", "BadRunDir"}


def words(nodes: Iterable[ast.AST]) -> str:
    """The fixed parts of a message, what is put in left out."""
    return " ... ".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@cache
def texts() -> list[str]:
    """The fixed parts of each source file."""
    return [words(nodes(tree)) for tree in sources().values()]


def complaints() -> Iterator[str]:
    for tree in sources().values():
        for call in nodes(tree):
            if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) in COMPLAINTS:
                yield words(ast.walk(call.args[0]))


def test_runbook_quotes_match_code() -> None:
    said = "\n".join(texts())
    unknown = [quote for quote in QUOTED if quote not in said]
    assert not unknown, "these sentences have changed: change docs/operate/runbook.md with them"


def test_tls_refusal_quotes_match_code() -> None:
    text = (ROOT / "docs" / "operate" / "security.md").read_text()
    rows = re.findall(
        r"^\| (\"[^|]+) \|", text.partition("### What a refusal says")[2].partition("\n## ")[0], re.MULTILINE
    )
    parts = [part for row in rows for quote in re.findall(r'"([^"]+)"', row) for part in re.split(r"[A-Z]{4,}", quote)]
    said = "\n".join(texts())
    assert len(rows) > 5 and [part for part in parts if part not in said] == []


def test_runbook_covers_complaints_of_daemons() -> None:
    missing = [text for text in complaints() if len(text) > 8 and not any(quote in text for quote in QUOTED)]
    assert not missing, "say in docs/operate/runbook.md what these mean and what to do"


def test_runbook_covers_every_error_kind() -> None:
    section = TEXT.partition("## Incidents by kind")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)))
    assert [kind for kind in get_args(ErrorKind) if kind not in named] == []


def test_runbook_covers_every_node_state() -> None:
    section = TEXT.partition("## Nodes")[2].partition("\n## ")[0]
    assert [status for status in NodeStatus if f"`{status.value}`" not in section] == []
    assert [text for text in isolation._WAITS.values() if text.partition(":")[0] not in section] == []


def test_runbook_metrics_are_exported() -> None:
    exported = {name for text in texts() for name in re.findall(r"unicron_[a-z_]+", text)}
    named = set(re.findall(r"`(unicron_[a-z_]+)`", TEXT))
    assert named and {name.removesuffix("_total") for name in named} <= exported
