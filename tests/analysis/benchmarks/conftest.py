from tests.training.calibrate.conftest import cache, quick_start  # noqa: F401 (fixtures)
