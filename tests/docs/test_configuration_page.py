"""`docs/configuration.md` has every key, as the configuration declares it today."""

from analysis.configuration_page import PAGE, page
from megatron_longctx.config import Config, TrainConfig, keys_of
from megatron_longctx.config.bounds import comments, meanings


def test_the_page_is_what_the_configuration_says() -> None:
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "python -m analysis.configuration_page writes it again"
    assert [name for name, meaning in meanings(Config).items() if not meaning] == [], "a comment beside the field"
    assert meanings(Config).keys() == keys_of(Config).keys()
    assert all(f"| `{name}` |" in text for name in keys_of(Config))


def test_comments_beside_and_above_a_field_are_found() -> None:
    said = comments(TrainConfig)
    assert said["save"] == "checkpoint at the end and when stopped"
    assert said["check_data"].startswith("Refuse a tokenizer") and said["check_data"].endswith("after the last.")
