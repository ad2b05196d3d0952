"""The `plan` verb: a plan in words, priced and drawn; all modes ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import Config, configured_mode, mode_options, planned_mask, ranks_summed, token_unit, workload_of
from ..errors import refuse
from ..memory import command
from ..schedules import (
    Costs,
    Plan,
    Takes,
    Target,
    backward_plan,
    build_plan,
    keep_received,
    keeps_received,
    sum_in_nodes,
)
from ..schedules import mask as masks
from ..schedules.describe import describe, describe_placement, summary
from ..schedules.draw import draw, draw_modes, draw_placement, draw_timeline
from ..schedules.select import Problem, rank_modes, table
from ..schedules.simulate import Simulation, simulate
from ..topology import Cluster, load_cluster


def show(
    config: Config,
    *,
    causal: bool = True,
    backward: bool = False,
    picture: Path | None = None,
    timeline: Path | None = None,
    documents: str | None = None,
) -> None:
    """Print a summary of the configured plan and all of it, with its price where a cluster is named, and draw it.

    Args:
        picture, timeline: files for the plan, and for what ranks do when.
        documents: lengths of a pack's documents, in the place of one of `data.seq_length`: where each lies is printed
            and drawn. None: those of the dataset's first pack, where `data.packing` makes packs and there is a dataset.

    Raises:
        ValueError: a plan that cannot be built, a picture that cannot be drawn, lengths that are none.
    """
    _check_picture("--draw", picture)
    _check_picture("--timeline", timeline)
    config = _with_mode(config)
    pack = _first_pack(config) if documents is None else _lengths(documents)
    lengths = [config.data.seq_length] if pack is None else pack
    config = replace(config, data=replace(config.data, seq_length=sum(lengths)))
    cluster = _cluster(config) if config.parallelism.cluster else None
    if timeline and cluster is None:
        raise refuse("--timeline", timeline, "parallelism.cluster=NAME beside it", _REMEDY)
    _check_size("--draw", picture, config)
    _check_size("--timeline", timeline, config)
    plan = _configured(config, _mask(config, causal, lengths))
    plan = backward_plan(plan) if backward else plan
    target = _target(config, packed=pack is not None)
    simulation, time = None, "not simulated: name a cluster, as in parallelism.cluster=h200_x8"
    if cluster is not None:
        simulation = simulate(plan, cluster, target, timeline=timeline is not None)
        time = f"{simulation.seconds * 1e3:.3f} ms on {cluster.name}, simulated, of one layer's attention"
    rows = [*summary(plan, target.workload), f"  time     {time}", *(f"  {line}" for line in command.brief(config))]
    print(describe(plan, target, rows))
    if simulation is not None and cluster is not None:
        print("\n" + _price(simulation, cluster))
    if pack is not None:
        print("\n" + describe_placement(plan, target.workload, simulation))
    if simulation is not None and timeline:
        draw_timeline(simulation, timeline)
        print(f"\ntime line drawn to {timeline}")
    if picture:
        (draw if pack is None else draw_placement)(plan, picture)
        print(f"\ndrawn to {picture}")


def compare(config: Config, picture: Path, *, causal: bool) -> None:
    """Print all modes ranked by simulated time, and draw them side by side (an empty path: without drawing).

    Raises:
        ValueError: no cluster named, or one that does not say what its devices do.
    """
    drawn = picture if picture != Path() else None
    _check_picture("--compare", drawn)
    _check_size("--compare", drawn, config)
    if config.parallelism.cluster is None:
        raise refuse("--compare", "given", "parallelism.cluster=NAME beside it", _REMEDY)
    cluster, target = _cluster(config), _target(config)
    par = config.parallelism
    options = replace(mode_options(par), inner_size=None, max_buffer_tokens=None, head_chunks=1)
    n, length = par.context_parallel_size, config.data.seq_length
    mask = _mask(config, causal)
    keep, summed = config.keep_received, config.attention.sum_in_node
    unit, layout = token_unit(par), par.layout
    problem = Problem(n, mask, target, unit, layout, options, keep_received=keep, sum_in_node=summed)
    ranking = rank_modes(problem, cluster, timeline=drawn is not None)
    heads = target.workload
    title = (
        f"{config.model.name}: {length:,} tokens, {problem.n} ranks of {cluster.name}, "
        f"heads {heads.num_heads}:{heads.num_kv_heads} x {heads.head_sizes}, {'causal' if causal else 'full'}"
    )
    print(f"{title}; one attention layer, simulated\n{table(ranking)}")
    if drawn:
        draw_modes(ranking, drawn, title)
        print(f"\ndrawn to {drawn}")


def show_memory(config: Config, picture: Path | None, longest: bool, device_gib: float | None) -> int:
    """Print what a step needs of a rank's memory where `picture` is not None (an empty path: without drawing), and the
    longest sequences where asked for.

    Returns:
        the exit code: 1 where a step does not fit.

    Raises:
        ValueError: a picture that cannot be drawn, no device's memory named, no mode named, heads that the mode cannot
            share, a plan that cannot be built.
    """
    config = _with_mode(config)
    _check_heads(config)
    fits = True
    if picture is not None:
        drawn = picture if picture != Path() else None
        _check_picture("--memory", drawn)
        fits = command.show(config, drawn, device_gib)
    if longest:
        _check_size("--max-length", "given", config)
        command.show_max_length(config, device_gib)
    return 0 if fits else 1


_MOST_MESSAGES = 20_000  # of a plan that is drawn: 141 ranks of a ring
_REMEDY = "Name one of recipes/cluster, or a file that `megatron-longctx calibrate --links` has written."


def _cluster(config: Config) -> Cluster:
    par = config.parallelism
    assert par.cluster is not None
    return load_cluster(par.cluster).resized(par.context_parallel_size)


def _with_mode(config: Config) -> Config:
    """With the mode that `auto` takes on the cluster named, which is printed with the ranking."""
    par = config.parallelism
    if par.schedule != "auto" or par.cluster is None:
        return config
    from ..training.auto import planned  # takes seconds to import

    chosen, ranking = planned(config)
    print(f"parallelism.schedule=auto takes {ranking[0].name} on {par.cluster}, simulated:\n{table(ranking)}\n")
    return chosen


def _check_heads(config: Config) -> None:
    """Refuse what training would refuse: no mode, or one that cannot share the heads among the ranks."""
    par, model = config.parallelism, config.model
    if par.schedule == "auto":
        raise refuse("parallelism.schedule", "auto", "a mode", "Name one, or rank all of them with --compare.")
    heads = (model.num_attention_heads // par.tensor_parallel_size, model.num_kv_heads // par.tensor_parallel_size)
    mode = configured_mode(par)
    mode.check_heads(par.context_parallel_size, *heads)


def _first_pack(config: Config) -> list[int] | None:
    """None without packs, and, which is said, without a dataset."""
    data = config.data
    if data.packing == "none":
        return None
    missing = [prefix for _, prefix in data.datasets if not Path(f"{prefix}.idx").is_file()]
    if missing:
        print(f"no dataset {missing[0]} yet: this is one document of data.seq_length; --documents takes a pack's\n")
        return None
    from ..mcore.data import first_pack  # takes seconds to import

    found = list(first_pack(config))
    print(f"the first pack of {data.prefix}, of {len(found)} documents; --documents takes others\n")
    return found


def _lengths(documents: str) -> list[int]:
    """Of `900,13600`."""
    try:
        found = [int(each) for each in documents.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise refuse("--documents", documents, "lengths from 1 on, with commas between", "Correct it.")
    return found


def _configured(config: Config, mask: masks.Mask) -> Plan:
    par = config.parallelism
    _check_heads(config)
    n, length = par.context_parallel_size, config.data.seq_length
    plan = build_plan(par.schedule, n, mask, mode_options(par), token_unit(par), par.layout)
    keep = keeps_received(config.keep_received, par.schedule, n, length, config.train.micro_batch_size)
    return sum_in_nodes(keep_received(plan) if keep else plan, ranks_summed(config))


def _mask(config: Config, causal: bool, lengths: Sequence[int] | None = None) -> masks.Mask:
    if causal:
        return planned_mask(config, lengths)
    return masks.documents(lengths or [config.data.seq_length], causal=False)


def _target(config: Config, packed: bool = False) -> Target:
    """Of a kernel that takes packs, rectangles and windows where there are any of them, else of the plainest."""
    special = packed or config.model.window is not None
    return Target(workload_of(config), Takes(packed=special, rectangles=special, windows=special))


def _price(simulation: Simulation, cluster: Cluster) -> str:
    costs = Costs.of_device(cluster.device)
    busiest = simulation.busiest_link
    rows = [
        f"simulated on {cluster.name} ({costs.forward_tflops:.0f} TFLOP/s forward, "
        f"{costs.backward_tflops:.0f} backward)",
        f"  time           {simulation.seconds * 1e3:.3f} ms, {simulation.idle_share:.1%} of rank-time not computing",
        f"  computing      {min(simulation.compute_s) * 1e3:.3f} to {max(simulation.compute_s) * 1e3:.3f} ms a rank",
        f"  waiting        {min(simulation.exposed_s) * 1e3:.3f} to {max(simulation.exposed_s) * 1e3:.3f} ms a rank "
        "for messages",
        f"  busiest link   {busiest[0]}, {busiest[1]:.1%} of the time" if busiest else "  busiest link   none",
        f"  memory         {simulation.peak_bytes / 2**30:.3f} GiB at most for this call, kernels' workspace apart",
    ]
    return "\n".join(rows)


def _check_size(option: str, given: object, config: Config) -> None:
    """Refuse a picture, or a search over many lengths, of a plan that would take hours and that nobody could read."""
    if not given:
        return
    par = config.parallelism
    n = par.context_parallel_size
    messages = configured_mode(par).num_messages(n, config.data.seq_length)
    if messages > _MOST_MESSAGES:
        expected = f"a plan of at most {_MOST_MESSAGES:,} messages; {par.schedule} has {messages:,} here"
        raise refuse(option, given, expected, "Take fewer context-parallel ranks.")


def _check_picture(option: str, picture: Path | None) -> None:
    if picture and (picture.suffix != ".png" or not picture.parent.is_dir()):
        remedy = f"Put settings before {option}." if "=" in str(picture) else "Give another file name."
        raise refuse(option, picture, "a .png file in a folder that exists", remedy)
