"""For fork servers alone: what they preload, where loading takes long."""

import time

time.sleep(60.0)
