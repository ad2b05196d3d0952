from tests.calibrate.conftest import cache, quick_start  # noqa: F401 (fixtures)
