"""TransformerEngine's attention to compare with: what it cannot do is refused, never left to ours."""

import pytest

from megatron_longctx.compose import compose_config
from tests.config.test_settings_refused import refusal


@pytest.mark.parametrize(
    ("baseline", "words", "given", "expected"),
    [
        ("te_p2p", ["recompute=attention_output"], "recompute.mode=attention_output", "none or layer"),
        ("te_p2p", ["model.window=64"], "model.window=64", "null"),
        ("te_a2a", ["model.sinks=learnable"], "model.sinks=learnable", "none"),
        ("te_a2a", ["attention.deterministic=true"], "attention.deterministic=True", "false"),
        ("te_a2a", ["train.device=cpu"], "train.device=cpu", "auto or cuda"),
    ],
)
def test_what_it_does_not_serve(baseline: str, words: list[str], given: str, expected: str) -> None:
    said = refusal(f"attention.baseline={baseline}", *words)
    assert said.startswith(f"{given}: expected {expected} with attention.baseline={baseline}. Change it, or leave ")


def test_lengths_are_multiples_of_its_pieces() -> None:
    said = refusal("attention.baseline=te_a2a", "parallelism=cp4", "data.seq_length=4100")
    assert said.startswith("2 x parallelism.context_parallel_size=8: expected a divisor of data.seq_length=4100")


def test_what_it_serves() -> None:
    compose_config(["attention.baseline=te_all_gather", "model.window=64", "recompute=layer", "parallelism=cp4"])
