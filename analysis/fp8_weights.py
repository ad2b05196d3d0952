"""The runs of `analysis.fp8 --weights`: weights in FP8 alone (`train.fp8_param`), beside those with bf16 copies."""

from collections.abc import Iterator, Sequence


def checks(recipes: Sequence[str], six: tuple[str, ...], tp2: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the settings of the runs that `pairs` compares, and of those that they go on from, which are before them.

    Args:
        six: the settings of a run of six steps.
        tp2: those of tensor parallelism.
    """
    saving = (*six, "train.save=true")
    found: dict[str, tuple[str, ...]] = {"bf16_saved": (*saving, "train.steps=3")}
    for recipe in recipes:
        copies = (*saving, f"train.fp8={recipe}")
        alone = (*copies, "train.fp8_param=true")
        for kind, words in ((recipe, copies), (f"{recipe}_param", alone)):
            found |= {
                f"{kind}_cp2": words,
                f"{kind}_saved": (*words, "train.steps=3"),
                f"{kind}_begun": (*words, "begins_with=bf16_saved"),
            }
        found |= {
            f"{recipe}_param_cp1": (*alone, "parallelism=single"),
            f"{recipe}_param_saving": (*alone, "train.save_interval=2"),
            f"{recipe}_param_gathered": (*alone, "parallelism.overlap_param_gather=false"),
            f"{recipe}_param_resumed": alone,
            f"{recipe}_param_resumed_tp2": (*alone, *tp2),
            f"{recipe}_param_resumed_without": copies,
            f"{recipe}_resumed_param": alone,
        }
    return found


def pairs(recipe: str) -> Iterator[tuple[str, str, str]]:
    """Yield the names of two runs that should be equal, but for rounding, and what differs."""
    for first, second, what in (
        ("param_cp2", "cp2", "without bf16 copies and with"),
        ("param_begun", "begun", "begun with a bf16 run's weights, without copies and with"),
        ("param_cp1", "param_cp2", "CP 1 and CP 2"),
        ("param_saving", "param_cp2", "saved every 2 steps and at the end"),
        ("param_gathered", "param_cp2", "gathered before forward and during it"),
        ("param_resumed", "param_cp2", "saved after 3 steps and resumed"),
        ("param_resumed_tp2", "param_cp2", "saved after 3 steps and resumed with TP 2"),
        ("param_resumed_without", "param_cp2", "saved after 3 steps and resumed with copies"),
        ("resumed_param", "cp2", "saved after 3 steps with copies and resumed without"),
    ):
        yield f"{recipe}_{first}", f"{recipe}_{second}", f"{recipe}, weights in FP8: {what}"
