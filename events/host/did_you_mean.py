"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def guess(word: str, choices: Sequence[str], otherwise: str = "") -> str:
    """Suggest the choice that `word` was meant to be: "did you mean X?", or `otherwise`, by default the list to choose
    from."""
    matches = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {matches[0]}?" if matches else otherwise or f"choose from {', '.join(choices)}"
