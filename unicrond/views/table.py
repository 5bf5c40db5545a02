"""The views that have a name: a head runs all of them, and any log shows them.

`GET /v1/views/NAME` gives a head's value, `unicron-replay view NAME` that of a log. A head that begins with a snapshot
feeds a view only what comes after it, but for the goodput, whose totals the snapshot holds.
"""

from __future__ import annotations

from unicrond.views.goodput_keeper import GoodputKeeper
from unicrond.views.spans import Spans
from unicrond.views.view import JsonView

#: Name -> class, which takes no arguments.
VIEWS: dict[str, type[JsonView]] = {
    "goodput": GoodputKeeper,
    "spans": Spans,
}
