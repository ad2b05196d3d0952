"""Shared settings of the attention tests."""

from hypothesis import settings

settings.register_profile("long", deadline=None)  # see test_masks
