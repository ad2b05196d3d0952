"""Medians of a recorded run exclude the first steps and a profiled step."""

import json
from pathlib import Path

import pytest
import yaml

from analysis.record import read_run


def _run(folder: Path, seconds: list[float], profile_step: int | None) -> Path:
    folder.mkdir()
    lines = [
        json.dumps({"train/step": i, "perf/step_s": s, "perf/tokens_per_s": 90 / s}) for i, s in enumerate(seconds, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"logging": {"profile_step": profile_step}}))
    (folder / "environment.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("profiled", "expected"), [(None, 4.5), (5, 4.0)])
def test_medians_exclude_the_first_steps_and_a_profiled_one(
    tmp_path: Path, profiled: int | None, expected: float
) -> None:
    run = read_run(_run(tmp_path / "a", [90.0, 8.0, 7.0, 4.0, 5.0], profiled))
    assert run["medians"]["perf/step_s"] == expected and len(run["steps"]) == 5
    assert run["medians"]["mean_tokens_per_s"] == pytest.approx({4.5: 180 / 9, 4.0: 90 / 4}[expected])


def test_a_run_of_only_warm_up_steps_has_medians_of_them(tmp_path: Path) -> None:
    assert read_run(_run(tmp_path / "a", [9.0, 2.0], 2))["medians"]["perf/step_s"] == 5.5
