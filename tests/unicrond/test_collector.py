"""Full collections look at what is new (unicrond/service/coordinator/garbage_collection.py)."""

from __future__ import annotations

import gc
import weakref

from unicrond.service.coordinator.garbage_collection import short_pauses


class Thing:
    def __init__(self) -> None:
        self.me: Thing | None = None


def test_collector_skips_frozen_objects_until_thaw() -> None:
    gc.collect()
    with short_pauses(thaw_after=3):
        kept = Thing()
        kept.me = kept
        gc.collect()
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        young = Thing()
        young.me = young
        gone, late = weakref.ref(young), weakref.ref(kept)
        del young
        gc.collect()
        assert gone() is None, "what came since is collected"
        kept.me, again = None, Thing()
        again.me = again
        del kept
        assert late() is None, "reference counts free what is frozen"
        late = weakref.ref(again)
        gc.freeze()
        del again
        assert late() is not None
        gc.collect()
        assert late() is None, "the third looks at all"
    assert gc.get_freeze_count() == 0 and all("short_pauses" not in repr(each) for each in gc.callbacks)
