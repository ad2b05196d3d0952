"""What all tests share."""

from hypothesis import settings

settings.register_profile("default", deadline=None)  # a busy machine only makes tests slower
settings.load_profile("default")
