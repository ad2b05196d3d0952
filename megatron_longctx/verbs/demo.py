"""The demo: the same training with four context-parallel ranks and with one, side by side."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence

from ..compare import compare
from ..compose import compose_config
from ..training.launcher import train
from ..training.run_folder import RunFolder
from ..training.text import prepare_missing

logger = logging.getLogger(__name__)

_RUNS = (("demo-cp4", "cp4"), ("demo-cp1", "single"))


def demo(overrides: Sequence[str] = ()) -> None:
    """Prepare the text, train twice, print one table and write `runs/demo.png`.

    Args:
        overrides: settings of both runs, after those of the demo.

    Raises:
        ValueError: settings that cannot run.
        JobFailed: a rank failed.
    """
    begin = time.perf_counter()
    prepare_missing(compose_config(["experiment=demo", *overrides]).data)
    folders = []
    for name, parallelism in _RUNS:
        settings = ["experiment=demo", f"parallelism={parallelism}", f"run.name={name}", *overrides]
        folder = RunFolder.of(compose_config(settings)).path
        if folder.exists():
            logger.info("removing %s of an earlier demo", folder)
            shutil.rmtree(folder)
        logger.info("\n== %s ==", " ".join(["megatron-longctx train", *settings]))
        train(settings)
        folders.append(folder)
    logger.info("\n== the two runs side by side ==")
    compare(sorted(folders), out=folders[0].parent / "demo.png")
    logger.info("the demo took %.0f s", time.perf_counter() - begin)
