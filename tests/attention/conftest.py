"""What the tests of this room share."""

from hypothesis import settings

settings.register_profile("long", deadline=None)  # see test_masks
