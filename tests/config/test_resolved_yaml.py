"""A configuration is read back unchanged from a run's folder, and other files are refused."""

from pathlib import Path

import pytest
import yaml

from megatron_longctx.config import Config
from megatron_longctx.config.files import bundled
from megatron_longctx.training.compose import compose_config, load_config, save_config

COMPOSED = (
    (),
    ("experiment=demo", "run.name=a b: c # d"),
    ("experiment=llama3_8b_extend_128k_cp8_h200_bf16", "optim.lr=1e-7", "optim.min_lr=1e-8", "train.save_interval=3"),
    ("model=gpt2", "parallelism=tp2_cp4", "run.name=null-ish", "data.prefix=/tmp/x'y", "train.save=false"),
    ("run.name=123", "data.prefix=1e5", "logging.wandb_project=true"),
)


@pytest.mark.parametrize("words", COMPOSED)
def test_round_trip(words: tuple[str, ...], tmp_path: Path) -> None:
    config = compose_config(words)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text()) == config.as_dict()


def spoiled(tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / "resolved.yaml"
    save_config(Config(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("train:\n", "train:\n  novelty: 1\n", "novelty"),
        ("model:\n", "novelty: 1\nmodel:\n", "novelty"),
        ("steps: 20\n", "steps: many\n", "many"),
        ("train:\n", "train: [\n", "resolved.yaml"),
        ("name: tiny\n", "name: !!python/object/apply:os._exit [7]\n", "could not determine a constructor"),
        ("name: tiny\n", "name: &a tiny\n", "an anchor or alias"),
        ("name: tiny\n", "name: ${oc.env:HOME}\n", "${…}"),
        ("steps: 20\n", f"steps: {'[' * 3000}\n", "more than 20 levels"),
    ],
)
def test_a_file_of_another_version_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    path = spoiled(tmp_path, old, new)
    with pytest.raises(ValueError, match="not a configuration of this version") as caught:
        load_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and reason in text and text.endswith("Restore or delete it.")


def test_keys_that_are_gone_are_skipped_where_they_changed_nothing(tmp_path: Path) -> None:
    was = "attention:\n  baseline: null\n"
    assert load_config(spoiled(tmp_path, "attention:\n", was)) == Config()
    with pytest.raises(ValueError, match=r"not a configuration of this version .*baseline"):
        load_config(spoiled(tmp_path, "attention:\n", was.replace("null", "te_p2p")))
    rules = "inference:\n  evict: false\n  rule: auto\n  rule_alpha: -1.059\n  rule_beta: 1.145\n  rule_gamma: 12.112\n"
    assert load_config(spoiled(tmp_path, "inference:\n", rules)) == Config()


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    save_config(Config(), path)
    whole = path.read_bytes()
    lines = [at + 1 for at, byte in enumerate(whole[:-1]) if byte == ord("\n")]
    for end in (0, 1, len(whole) - 3, len(whole) - 1, *lines[::-8]):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="not a configuration of this version") as caught:
            load_config(path)
        assert str(path) in str(caught.value), end
    path.write_bytes(whole)
    assert load_config(path) == Config()


def test_values_are_validated_on_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^train\.steps=0: expected at least 1 and at most"):
        load_config(spoiled(tmp_path, "steps: 20\n", "steps: 0\n"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a run's configuration there"):
        load_config(tmp_path / "resolved.yaml")


def test_recipes_and_launch_scripts_are_those_of_the_checkout() -> None:
    root = Path(__file__).resolve().parents[2]
    assert [bundled(name) for name in ("recipes", "launch", "analysis")] == [
        root / name for name in ("recipes", "launch", "analysis")
    ]
    with pytest.raises(ValueError, match=r"^nothing: expected this folder in "):
        bundled("nothing")
