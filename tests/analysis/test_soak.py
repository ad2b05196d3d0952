"""Mixed requests lose no page, whatever happens to them, and get the answers that their prompts get alone."""

import pytest

from analysis.soak import configuration, serve
from megatron_longctx.testing.distributed import run_distributed


@pytest.mark.parametrize(("n", "requests"), [(1, 150), (2, 50)])
def test_mixed_requests_lose_no_page(n: int, requests: int) -> None:
    rows = run_distributed(serve, n, configuration(n), requests)[0]
    assert rows[-1][0] == requests
