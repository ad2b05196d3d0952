"""docs/api.rst, docs/plain_pytorch.md and the README: every example runs, and every public name has one."""

import re
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import megatron_longctx
from megatron_longctx.testing.distributed import run_distributed
from tests.core.attention.test_alone import run_alone
from tests.docs.test_docs import FENCED, ROOT

PAGE = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
EXAMPLES = [
    textwrap.dedent(code) for code in re.findall(r"^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)", PAGE, re.MULTILINE)
]
README = next(
    code for kind, code in FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8")) if kind == "python"
)
SCRIPT = next(
    code
    for kind, code in FENCED.findall((ROOT / "docs" / "plain_pytorch.md").read_text(encoding="utf-8"))
    if kind == "python" and "__main__" in code
)


def _run_examples(rank: int) -> int:
    names: dict[str, object] = {"dist": dist}  # later examples use what earlier ones import
    for code in (*EXAMPLES, README):
        exec(compile(code, "docs/api.rst or README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape  # type: ignore[attr-defined]
    return len(EXAMPLES)


def test_every_public_name_has_an_example_that_runs_on_3_ranks() -> None:
    for name in megatron_longctx.__all__:
        assert f".. autoclass:: megatron_longctx.{name}\n" in PAGE
        assert any(re.search(rf"import .*\b{name}\b", code) for code in EXAMPLES), name
    assert run_distributed(_run_examples, 3) == [len(EXAMPLES)] * 3 and len(EXAMPLES) == 5


def test_public_names_load_on_first_use() -> None:
    assert set(megatron_longctx.__all__) <= set(dir(megatron_longctx))
    with pytest.raises(AttributeError, match="has no attribute 'Masks'"):
        _ = megatron_longctx.Masks  # type: ignore[attr-defined]
    assert (Path(megatron_longctx.__file__).parent / "py.typed").is_file()


def test_the_script_trains_alike_on_one_rank_and_on_three(tmp_path: Path) -> None:
    """In an environment with torch and numpy alone. The ranks are forks, so they have no other packages either."""
    output = run_alone(
        f"""
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

example = {{"__name__": "example"}}
exec(compile({SCRIPT!r}, "docs/plain_pytorch.md", "exec"), example)

def run(number, folder):
    torch.set_num_threads(1)
    group = None
    if number:  # the other process is one rank alone
        dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=number - 1, world_size=3)
        group = dist.group.WORLD
    losses = example["train"](group)
    if number < 2:
        print(number, *losses, flush=True)
    if number:
        dist.barrier()
        dist.destroy_process_group()

mp.start_processes(run, args=(sys.argv[1],), nprocs=4, start_method="fork")
""",
        str(tmp_path),
    )
    alone, sharded = ([float(loss) for loss in line.split()[1:]] for line in sorted(output.splitlines()))
    assert sharded == pytest.approx(alone, rel=1e-5) and len(alone) == 5
    assert alone[-1] < 0.8 * alone[0], "it learns"
