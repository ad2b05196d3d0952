"""Whether a job fits into memory, settings to change if not, the longest sequence that fits, reports and pictures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...config import MAX_TOKENS, RECOMPUTES, Config, token_unit, validate
from ...config.cluster import GIB, load_cluster
from ...core.errors import refuse
from .model import OFFLOAD, Prediction, checkpoint_bytes, predict
from .shapes import Job

_MAX_GIB = 10**6  # as for the devices of clusters
_BYTE_LEVEL_ENTRIES = 512  # of Megatron's byte-level tokenizer
SAFE_SHARE = 0.9
"""The share of a device that live tensors may take without a warning. In recorded runs, the caching allocator reserved
up to 15% more than was live."""
_CHEAPEST_FIRST = (  # in time: `layer` runs attention twice; with the share of attention's results that is kept
    *((mode, 1.0) for mode in RECOMPUTES if mode != "layer"), ("attention_output", 0.5), ("layer", 1.0),
)  # fmt: skip
_CHUNK, _TILE = 4096, 16384
"""The recommended tokens per piece of the LM head and of an MLP: enough for long matrix products, few for a layer."""


def check(job: Job, capacity: int, host_capacity: int | None = None) -> str | None:
    """Refuse a job whose live tensors alone do not fit, with settings that do. Return a warning if little is left.

    Args:
        capacity: bytes of a rank's device.
        host_capacity: bytes of host memory per rank; None if unknown.
    """
    prediction = predict(job)
    needed, on_host, train = prediction.num_bytes, prediction.host_bytes, job.config.train
    if host_capacity is not None and on_host > host_capacity:
        expected = f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; it takes {on_host / GIB:.1f}"
        if job.config.recompute.mode == OFFLOAD:
            remedy = "Set recompute=attention_output or layer, or shorten data.seq_length."
            raise refuse("recompute.mode", OFFLOAD, expected, remedy)
        raise refuse("optim.states_on_host", True, expected, "Set it to false.")
    advice = "" if needed <= SAFE_SHARE * capacity else _advice(job, int(SAFE_SHARE * capacity), host_capacity)
    if needed > capacity:
        takes = f"it is predicted to take {needed / GIB:.1f} GiB, most in {prediction.peak.name}"
        expected = f"a step within the device's {capacity / GIB:.1f} GiB; {takes}"
        remedy = f"{advice} train.check_memory=false starts the run nevertheless."
        raise refuse("data.seq_length", job.config.data.seq_length, expected, remedy)
    saved = checkpoint_bytes(job)
    if train.save and train.async_save and host_capacity is not None and on_host + saved > host_capacity:
        copy = f"the copy of a checkpoint takes {saved / GIB:.1f}"
        expected = f"at most {host_capacity / GIB:.1f} GiB of host memory a rank; {copy}"
        raise refuse("train.async_save", True, expected, "Set it to false.")
    if not advice:
        return None
    return (
        f"a step is predicted to take {needed / GIB:.1f} of the device's {capacity / GIB:.1f} GiB, "
        f"and the allocator needs some per cent more: it may run out. {advice}"
    )


def max_length(job: Job, capacity: int) -> int:
    """Return the longest `data.seq_length` whose step fits, or 0 if none does.

    It is a multiple of the lengths that divide evenly among the ranks, and at most `MAX_TOKENS`. `capacity` is the
    bytes for live tensors.
    """
    par = job.config.parallelism
    unit = math.lcm(2 * par.context_parallel_size * par.tensor_parallel_size, token_unit(job.config))

    def fits(units: int) -> bool:
        return predict(with_length(job, units * unit)).num_bytes <= capacity

    if not fits(1):
        return 0
    fitting, most = 1, MAX_TOKENS // unit
    while 2 * fitting <= most and fits(2 * fitting):
        fitting *= 2
    step = fitting
    while step := step // 2:
        if fitting + step <= most and fits(fitting + step):
            fitting += step
    return fitting * unit


def with_length(job: Job, length: int) -> Job:
    """Return the job with sequences of `length` tokens."""
    return replace(job, config=replace(job.config, data=replace(job.config.data, seq_length=length)))


def _advice(job: Job, capacity: int, host_capacity: int | None) -> str:
    """Name the cheapest settings that fit, else the longest sequence with any settings, else more ranks."""
    alternatives = [
        (settings, cheaper)
        for settings, cheaper in _alternatives(job)
        if _is_valid(cheaper) and predict(cheaper).host_bytes <= (host_capacity or 0)  # an unknown host has no room
    ]
    for settings, cheaper in alternatives:
        needed = predict(cheaper).num_bytes
        if needed <= capacity:
            return f"Set {settings} ({needed / GIB:.1f} GiB)."
    longest = {settings: max_length(cheaper, capacity) for settings, cheaper in [("", job), *alternatives]}
    settings = max(longest, key=lambda settings: longest[settings])
    if longest[settings]:
        keys = f"{settings} and data" if settings else "data"
        return f"Set {keys}.seq_length={longest[settings]} or less, or raise parallelism.context_parallel_size."
    return "Raise parallelism.tensor_parallel_size or pipeline_parallel_size, or take a smaller model."


def _is_valid(job: Job) -> bool:
    """Whether settings go together: experts and delayed scales have no tiles, for example."""
    try:
        validate(job.config)
    except ValueError:
        return False
    return True


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield settings that need less memory, as text and applied to the job, ordered by their cost in time."""
    now, fetching = job.config.recompute, []
    if any(job.plan.kept):
        fetching = ["attention.keep_received=false"]
        job = replace(job, config=replace(job.config, attention=replace(job.config.attention, keep_received="false")))
        yield fetching[0], job
    chunk, tile = now.head_chunk_tokens or _CHUNK, now.mlp_tile_tokens or _TILE
    for mode, share in _CHEAPEST_FIRST[_CHEAPEST_FIRST.index((now.mode, 1.0)) :]:
        cheaper = replace(now, mode=mode, kept_results=1.0 if mode == "layer" else min(share, now.kept_results))
        for changed in (
            cheaper,
            replace(cheaper, head_chunk_tokens=chunk),
            replace(cheaper, head_chunk_tokens=chunk, mlp_tile_tokens=tile),
        ):
            names = ("mode", "kept_results", "head_chunk_tokens", "mlp_tile_tokens")
            words = [f"recompute.{x}={getattr(changed, x)}" for x in names if getattr(changed, x) != getattr(now, x)]
            if words:
                yield " ".join([*fetching, *words]), replace(job, config=replace(job.config, recompute=changed))


def summary(job: Job) -> str:
    """Return the peak of a job's step in one line."""
    prediction = predict(job)
    fixed = sum(term.num_bytes for term in prediction.resident if not term.per_token)
    host = f", and {_size(prediction.host_bytes)} pinned on the host" if prediction.host_bytes else ""
    return (
        f"memory of a training step: {_size(prediction.num_bytes)} a rank, most in {prediction.peak.name}{host} "
        f"(recompute={job.config.recompute.mode}; {_size(fixed)} at any length)"
    )


def report(job: Job) -> str:
    """Return a table of all terms, the other phases, and host memory."""
    prediction = predict(job)
    tokens = max(prediction.tokens, 1)
    rows = [
        (term.name, term.num_bytes, f"{term.num_bytes / 1024 / tokens:.1f} KiB a token" if term.per_token else "")
        for term in prediction.terms
    ]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{summary(job)}\nrank with the most tokens: {prediction.tokens:,}"]
    if job.config.parallelism.pipeline_parallel_size > 1:
        lines[0] += f"; pipeline stage {prediction.stage}"
    lines += [f"  {name:{width}}  {_size(size):>12}  {per_token:>16}".rstrip() for name, size, per_token in rows]
    lines.append(f"  {'sum':{width}}  {_size(prediction.num_bytes):>12}")
    others = [phase for phase in prediction.phases if phase is not prediction.peak]
    lines += [f"in {phase.name}: {_size(prediction.resident_bytes + phase.num_bytes)}" for phase in others]
    if prediction.host_bytes:
        lines.append(f"on the host, pinned: {_size(prediction.host_bytes)} a rank")
    if job.config.train.save and job.config.train.async_save:
        lines.append(f"on the host, while a checkpoint is written: {_size(checkpoint_bytes(job))} a rank")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"


def planned_job(config: Config) -> Job:
    """Return the job of a configuration, with one data-parallel rank if it does not set their number.

    Refuse a vocabulary whose size is unknown without the tokenizer.
    """
    model = config.model
    if model.vocab_size is None and config.data.tokenizer != "byte-level":
        raise refuse("model.vocab_size", None, "a number, to predict memory", "Set it to the tokenizer's size.")
    rounded = -(-_BYTE_LEVEL_ENTRIES // model.vocab_multiple) * model.vocab_multiple
    ranks = config.parallelism.data_parallel_size or 1
    return Job(config, model.vocab_size or rounded, ranks, fused=config.train.device != "cpu")


def brief(config: Config) -> list[str]:
    """Return lines with the peak and whether the cluster's devices can hold it, or why the peak is unknown."""
    try:
        job, capacity = planned_job(config), _capacity(config, None)
        return [summary(job), *([] if capacity is None else [_verdict(predict(job).num_bytes, capacity)])]
    except ValueError as error:
        return [f"memory of a training step: not known ({error})"]


def show(config: Config, picture: Path | None, device_gib: float | None = None) -> bool:
    """Print every term of the configured mode and whether a device can hold a step; draw all modes into `picture`.

    `device_gib` is the memory of a device; None for that of `parallelism.cluster`, if it gives one. Return False if a
    step is known not to fit. Refuse a plan that cannot be built, and an unknown vocabulary size.
    """
    job, capacity = planned_job(config), _capacity(config, device_gib)
    print(report(job))
    needed = predict(job).num_bytes
    if capacity is not None:
        print(_verdict(needed, capacity))
    if picture:
        draw([(mode, predict(_with_mode(job, mode))) for mode in RECOMPUTES], picture, _title(job), capacity)
        print(f"\ndrawn to {picture}")
    return capacity is None or needed <= capacity


def show_max_length(config: Config, device_gib: float | None) -> None:
    """Print the longest sequence that fits, for every recompute mode.

    `device_gib` is the memory of a device; None for that of `parallelism.cluster`. Refuse if neither is given.
    """
    job, device = planned_job(config), _capacity(config, device_gib)
    if device is None:
        expected = "--device-gib N, or a parallelism.cluster that says how much memory a device has, beside it"
        raise refuse("--max-length", "given", expected, "For example --device-gib 139 for an H200.")
    capacity = int(SAFE_SHARE * device)
    print(
        f"longest sequences whose step takes at most {capacity / GIB:.1f} GiB a rank ({SAFE_SHARE:.0%} of a device), "
        f"by recompute mode (*: {config.recompute.mode}, as configured)"
    )
    for mode in RECOMPUTES:
        of_mode = _with_mode(job, mode)
        length = max_length(of_mode, capacity)
        on_host = predict(with_length(of_mode, length)).host_bytes if length else 0
        host = f", {on_host / GIB:.1f} GiB a rank pinned on the host" if on_host else ""
        mark = "*" if mode == config.recompute.mode else " "
        print(f" {mark} {mode:25}" + (f"{length:>14,} tokens{host}" if length else f"{'none':>14}"))


def _with_mode(job: Job, mode: str) -> Job:
    return replace(job, config=replace(job.config, recompute=replace(job.config.recompute, mode=mode)))


def _verdict(needed: int, capacity: int) -> str:
    """Say whether a device can hold a step, by the same bounds as `train`."""
    device = f"a device has {capacity / GIB:.1f} GiB: "
    if needed > capacity:
        missing = (needed - capacity) / GIB
        return f"{device}a step does not fit, by {missing:.2f} GiB (see --max-length, recompute, head_chunk_tokens)"
    return device + ("a step fits" if needed <= SAFE_SHARE * capacity else f"a step takes more than {SAFE_SHARE:.0%}")


def _capacity(config: Config, device_gib: float | None) -> int | None:
    """Return the bytes of a device; None if neither the argument nor the cluster gives them."""
    if device_gib is not None:
        if not 0 < device_gib <= _MAX_GIB:
            expected = f"a number of GiB above 0 and at most {_MAX_GIB:,}"
            raise refuse("--device-gib", device_gib, expected, "Give a device's memory.")
        return int(device_gib * GIB)
    cluster = load_cluster(config.parallelism.cluster) if config.parallelism.cluster else None
    if cluster is None or cluster.device.memory_gib is None:
        return None
    return int(cluster.device.memory_gib * GIB)


def _title(job: Job) -> str:
    config, par = job.config, job.config.parallelism
    chunk = config.recompute.head_chunk_tokens
    head = "logits of all tokens at once" if chunk is None else f"logits of {chunk:,} tokens at once"
    ranks = par.model_parallel_size * job.data_parallel_size
    sizes = f"{ranks} ranks (CP {par.context_parallel_size}, TP {par.tensor_parallel_size})"
    precision = config.train.precision + f" with FP8 ({config.train.fp8})" * (config.train.fp8 != "none")
    return f"{config.model.name}, {config.data.seq_length:,} tokens over {sizes}, {precision}, {head}"


def draw(bars: Sequence[tuple[str, Prediction]], path: Path, title: str, capacity: int | None = None) -> None:
    """Write a picture with one stacked bar per prediction; a term has the same colour in all bars.

    `bars` are names and predictions, from the top down, and `capacity` is the bytes of a device, drawn as a line.
    Raises OSError: `path` cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 1.9 + 0.62 * len(bars)))
    axes = figure.subplots()
    names = list(dict.fromkeys(term.name for _, prediction in bars for term in prediction.terms))
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    labelled = set()
    for row, (_, prediction) in enumerate(bars):
        left = 0.0
        for term in prediction.terms:
            size = term.num_bytes / GIB
            label = None if term.name in labelled else term.name
            labelled.add(term.name)
            axes.barh(row, size, left=left, height=0.7, color=colours[term.name], edgecolor="white", label=label)
            left += size
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(left + axes.get_xlim()[1] * 0.008, row, f"{left:.1f}", va="center", fontsize=9, bbox=frame)
    if capacity is not None:
        axes.axvline(capacity / GIB, color="black", linestyle="--", linewidth=1)
        axes.text(capacity / GIB, -0.6, f" device: {capacity / GIB:.0f} GiB", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.75)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.05)
    axes.set_xlabel("GiB a rank, at the peak of a training step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(title, fontsize=10.5, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
