"""What the tests of this room share."""

import sys
from pathlib import Path

from hypothesis import settings

# Functions that run in spawned ranks are pickled by module name: the ranks must find `tests` on their path.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

settings.register_profile("long", deadline=None)  # see test_masks
