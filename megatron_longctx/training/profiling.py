"""One training step under torch's profiler: its trace, and where its time goes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .. import files
from ..metrics.step_profile import Span, profile_of

logger = logging.getLogger(__name__)


@contextmanager
def profiled(folder: Path, step: int) -> Iterator[None]:
    """Profile what runs inside, and write `step_N.json`, `step_N.md` and the trace `step_N.trace.json.gz` (for Perfetto
    or chrome://tracing) into `folder`.

    On GPUs the operations are kernels and copies, by stream; on CPUs torch's operators, by thread.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(folder / f"step_{step}.trace.json.gz"))
    found = profile_of(_spans(recorded.events(), on_gpu))
    files.write_text(folder / f"step_{step}.json", json.dumps(found.as_dict(), indent=2) + "\n")
    files.write_text(folder / f"step_{step}.md", found.table() + "\n")
    logger.info("profile of step %d in %s\n%s", step, folder, found.table())


def _spans(events: Any, on_gpu: bool) -> Iterator[Span]:
    for event in events:
        time = event.time_range
        if on_gpu and event.device_type != DeviceType.CPU and not event.is_user_annotation:
            yield Span(event.name, event.device_resource_id, time.start * 1e-6, time.end * 1e-6)
        elif not on_gpu and event.cpu_parent is None:
            yield Span(event.name, event.thread, time.start * 1e-6, time.end * 1e-6)
