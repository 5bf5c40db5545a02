"""What the documents point to is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: [text](target) in Markdown, without anchors and addresses.
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
MENTION = re.compile(r"\bdocs/[\w./-]+\.(?:md|png)\b")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # an unpacked sdist
        return [path for pattern in patterns for path in ROOT.rglob(pattern) if ".venv" not in path.parts]
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_links_between_documents_lead_somewhere() -> None:
    dead = [
        f"{document.relative_to(ROOT)} -> {target}"
        for document in tracked("*.md")
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not dead


def test_documents_that_the_code_names_exist() -> None:
    dead = [
        f"{path.relative_to(ROOT)} names {mention}"
        for path in tracked("*.md", "*.py", "*.toml", "*.yaml", "Makefile")
        if path.name != "test_documents.py" and path.exists()
        for mention in MENTION.findall(path.read_text())
        if not (ROOT / mention).exists()
    ]
    assert not dead
