"""The `plan` verb: print, simulate and draw a plan; rank all modes; predict memory."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ..config import (
    Config,
    cluster_of,
    configured_mode,
    configured_plan,
    data_parallel_size,
    mode_options,
    names_as_keys,
    planned_mask,
    token_unit,
    workload_of,
)
from ..config.cluster import Cluster
from ..config.progress import Progress
from ..core.errors import refuse
from ..core.plans import KernelSupport, Target, backward_plan
from ..core.plans import mask as masks
from ..planner.calibration import head_sizes
from ..planner.choose_mode import Problem, rank_modes, table
from ..planner.cost import Costs
from ..planner.describe import describe, describe_placement, summary
from ..planner.draw import draw, draw_modes, draw_placement, draw_timeline
from ..planner.flops import Work, imbalance, training_flops
from ..planner.memory import reports
from ..planner.simulate import Simulation, simulate
from ..planner.step_time import predicted_step_s
from ..training.compose import compose_config

_MAX_MESSAGES = 20_000  # of a plan that is drawn: 141 ranks of a ring
_REMEDY = "Name one of recipes/cluster, or a file that `megatron-longctx calibrate --links` has written."


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Return the exit code."""
    _check_options(arguments)
    config, causal = compose_config(arguments.settings), not arguments.full_mask
    if arguments.memory is not None or arguments.max_length:
        return show_memory(config, arguments.memory, arguments.max_length, arguments.device_gib)
    if arguments.documents == "batch":
        show_batch(config)
    elif arguments.compare is not None:
        compare(config, arguments.compare, causal=causal)
    else:
        show(config, causal, arguments.backward, arguments.draw, arguments.timeline, arguments.documents)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored."""
    memory = {"memory", "max_length", "device_gib"}
    instead = {"memory": memory, "max_length": memory, "compare": {"compare", "full_mask"}}
    if arguments.documents == "batch":
        instead["documents"] = {"documents"}
    plan = {"backward", "full_mask", "draw", "timeline", "documents"}
    given = [name for name in (*instead, *plan, "device_gib") if getattr(arguments, name) not in (None, False)]
    first = next((name for name in given if name in instead), None)
    for name in given:
        if name not in (instead[first] if first else plan):
            option = f"--{name.replace('_', '-')}"
            expected = f"no --{first.replace('_', '-')} beside it" if first else "--memory or --max-length beside it"
            raise refuse(option, "given", expected, "Leave one out." if first else "Add one.")


def show(
    config: Config,
    causal: bool = True,
    backward: bool = False,
    picture: Path | None = None,
    timeline: Path | None = None,
    documents: str | None = None,
) -> None:
    """Print the configured plan and its simulated time, if a cluster is named, and draw it.

    Args:
        picture, timeline: files for the plan, and for what each rank does over time.
        documents: lengths of a pack's documents, for example `900,13600`; their placement is printed and drawn. None
            for the dataset's first pack if `data.packing` makes packs and there is a dataset.
    """
    _check_picture("--draw", picture)
    _check_picture("--timeline", timeline)
    config = _with_mode(config)
    pack = _first_pack(config) if documents is None else (_lengths(documents), None)
    lengths, parents = pack or ([config.data.seq_length], None)
    config = replace(config, data=replace(config.data, seq_length=sum(lengths)))
    cluster = cluster_of(config.parallelism)
    if timeline and cluster is None:
        raise refuse("--timeline", timeline, "parallelism.cluster=NAME beside it", _REMEDY)
    _check_size("--draw", picture, config)
    _check_size("--timeline", timeline, config)
    _check_heads(config)
    plan = configured_plan(config, _mask(config, causal, lengths, parents))
    plan = backward_plan(plan) if backward else plan
    target = _target(config, packed=pack is not None)
    simulation, time = None, "not simulated: name a cluster, as in parallelism.cluster=h200_x8"
    if cluster is not None:
        simulation = simulate(plan, cluster, target, timeline=timeline is not None)
        time = f"{simulation.seconds * 1e3:.3f} ms on {cluster.name}, simulated, of one layer's attention"
    rows = [*summary(plan, target.workload), f"  time     {time}", *(f"  {line}" for line in reports.brief(config))]
    print(describe(plan, target, rows, None if simulation is None else simulation.idle_share))
    if simulation is not None and cluster is not None:
        print("\n" + _simulated(simulation, cluster))
    if pack is not None:
        print("\n" + describe_placement(plan, target.workload, simulation))
    if simulation is not None and timeline:
        draw_timeline(simulation, timeline)
        print(f"\ntime line drawn to {timeline}")
    if picture:
        (draw if pack is None else draw_placement)(plan, picture)
        print(f"\ndrawn to {picture}")


def compare(config: Config, picture: Path, *, causal: bool) -> None:
    """Print all modes ranked by simulated time, and draw them side by side, unless the path is empty."""
    drawn = picture if picture != Path() else None
    _check_picture("--compare", drawn)
    _check_size("--compare", drawn, config)
    par = config.parallelism
    if (cluster := cluster_of(par)) is None:
        raise refuse("--compare", "given", "parallelism.cluster=NAME beside it", _REMEDY)
    problem = Problem(
        par.context_parallel_size,
        _mask(config, causal),
        _target(config),
        token_unit(config),
        config.layout,
        replace(mode_options(par), inner_size=None, max_buffer_tokens=None),
        keep_received=config.keep_received,
        sum_in_node=config.sum_in_node,
    )
    ranking = rank_modes(problem, cluster, timeline=drawn is not None)
    heads = problem.target.workload
    title = (
        f"{config.model.name}: {config.data.seq_length:,} tokens, {problem.n} ranks of {cluster.name}, "
        f"heads {heads.num_heads}:{heads.num_kv_heads} x {head_sizes(heads)}, {'causal' if causal else 'full'}"
    )
    print(f"{title}; one attention layer, simulated\n{table(ranking)}")
    if drawn:
        draw_modes(ranking, drawn, title)
        print(f"\ndrawn to {drawn}")


def show_batch(config: Config) -> None:
    """Print the packs of the first step, and what each data-parallel replica computes."""
    from ..mcore.corpus import check_corpus  # takes seconds to import
    from ..mcore.data import TrainingData, deal_rule, micro_batches
    from ..mcore.model import padded_vocab_size
    from ..mcore.packing import visible_pairs
    from ..mcore.tokenizer import build_tokenizer

    par, data, model = config.parallelism, config.data, config.model
    if data.packing == "none":
        raise refuse("data.packing", "none", "packs with --documents", "Set data.packing=best_fit.")
    count = data_parallel_size(config, par.model_parallel_size * (par.data_parallel_size or 1))
    check_corpus(data)
    tokenizer = build_tokenizer(data.tokenizer, data.tokenizer_path)
    vocab_size = padded_vocab_size(model, tokenizer.vocab_size)
    dataset = TrainingData(config, tokenizer, vocab_size)
    dealer = dataset.dealer(config, deal_rule(config, vocab_size))
    works, rows = [], []
    for replica in range(count):
        samples = islice(micro_batches(config, 0, replica, count, dealer), config.train.global_batch_size // count)
        packs = [dataset[each] for each in samples]
        pairs = [visible_pairs(pack.lengths, pack.parents, model.layer_windows) for pack in packs]
        work = [Work(sum(pack.lengths), seen, 0) for pack, seen in zip(packs, pairs, strict=True)]
        flops = [training_flops(model, vocab_size, one).causal / 1e12 for one in work]
        works.append(sum(work, Work(0, 0, 0)))
        documents, shown = sum(len(pack.lengths) for pack in packs), [f"{one:.4g}" for one in flops]
        rows.append(f"{replica:>9}{documents:>11,}{works[-1].tokens:>13,}{sum(flops):>13.4g}  {' '.join(shown)}")
    print(
        f"the first step of {data.prefix}: the busiest of {count} replicas (parallelism.data_parallel_size) computes "
        f"{imbalance(model, vocab_size, works):.1%} more than the average\n"
        "  replica  documents       tokens       TFLOP  of its packs, in order"
    )
    print("\n".join(rows))


def show_memory(config: Config, picture: Path | None, longest: bool, device_gib: float | None) -> int:
    """Print the memory and time of a training step on a rank, the longest sequences that fit, or both.

    Return the exit code: 1 if a step does not fit.

    Args:
        picture: file for all recompute modes; an empty path to print only; None to omit the step.
        device_gib: memory of a device; None for the cluster's.
    """
    config = _with_mode(config)
    _check_heads(config)
    fits = True
    if picture is not None:
        drawn = picture if picture != Path() else None
        _check_picture("--memory", drawn)
        fits = reports.show(config, drawn, device_gib)
        if (seconds := predicted_step_s(reports.planned_job(config))) is not None:
            tokens = config.train.global_batch_size * config.data.seq_length
            print(f"time of a training step: {seconds:.3g} s, {tokens / seconds:,.0f} tokens/s, simulated")
    if longest:
        _check_size("--max-length", "given", config)
        with Progress("searching the longest sequence"):
            reports.show_max_length(config, device_gib)
    return 0 if fits else 1


def _with_mode(config: Config) -> Config:
    """Replace `auto` by the mode that it chooses on the named cluster, and print the ranking."""
    par = config.parallelism
    if par.schedule != "auto" or par.cluster is None:
        return config
    from ..training.auto import resolve_for_cluster  # takes seconds to import

    resolved, ranking = resolve_for_cluster(config)
    print(f"parallelism.schedule=auto takes {ranking[0].name} on {par.cluster}, simulated:\n{table(ranking)}\n")
    return resolved


@names_as_keys()
def _check_heads(config: Config) -> None:
    """Refuse what training would refuse: no mode, or one that cannot divide the heads among the ranks."""
    par, workload = config.parallelism, workload_of(config)
    if par.schedule == "auto":
        raise refuse("parallelism.schedule", "auto", "a mode", "Name one, or rank all of them with --compare.")
    configured_mode(par).check_heads(par.context_parallel_size, workload.num_heads, workload.num_kv_heads)


def _first_pack(config: Config) -> tuple[Sequence[int], Sequence[int] | None] | None:
    """Return the lengths and parents of the documents in the first pack; None without packs or without a dataset."""
    data = config.data
    if data.packing == "none":
        return None
    missing = [prefix for _, prefix in data.datasets if not Path(f"{prefix}.idx").is_file()]
    if missing:
        print(f"no dataset {missing[0]} yet: this is one document of data.seq_length; --documents takes a pack's\n")
        return None
    from ..mcore.data import first_pack  # takes seconds to import

    pack = first_pack(config)
    print(f"the first pack of {data.prefix}, of {len(pack[0])} documents; --documents takes others\n")
    return pack


def _lengths(documents: str) -> list[int]:
    try:
        lengths = [int(each) for each in documents.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise refuse("--documents", documents, "lengths from 1 on, with commas between", "Correct it.")
    return lengths


def _mask(
    config: Config, causal: bool, lengths: Sequence[int] | None = None, parents: Sequence[int] | None = None
) -> masks.Mask:
    if causal:
        return planned_mask(config, lengths, parents)
    return masks.documents(lengths or [config.data.seq_length], causal=False, parents=parents)


def _target(config: Config, packed: bool = False) -> Target:
    """Return the workload on a kernel with packs, rectangles and windows if packs or windows need it."""
    special = packed or config.model.window is not None
    return Target(workload_of(config), KernelSupport(packed=special, rectangles=special, windows=special))


def _simulated(simulation: Simulation, cluster: Cluster) -> str:
    costs = Costs.of_cluster(cluster)
    busiest = simulation.busiest_link
    rows = [
        f"simulated on {cluster.name} ({costs.forward_tflops:.0f} TFLOP/s forward, "
        f"{costs.backward_tflops:.0f} backward)",
        f"  time           {simulation.seconds * 1e3:.3f} ms, {simulation.idle_share:.1%} of rank-time not computing",
        f"  computing      {min(simulation.compute_s) * 1e3:.3f} to {max(simulation.compute_s) * 1e3:.3f} ms a rank",
        f"  waiting        {min(simulation.exposed_s) * 1e3:.3f} to {max(simulation.exposed_s) * 1e3:.3f} ms a rank "
        "for messages",
        f"  busiest link   {busiest[0]}, {busiest[1]:.1%} of the time" if busiest else "  busiest link   none",
        f"  memory         {simulation.peak_bytes / 2**30:.3f} GiB at most for this call, without kernels' workspace",
    ]
    return "\n".join(rows)


def _check_size(option: str, given: object, config: Config) -> None:
    """Refuse to draw or search plans with so many messages that it would take hours."""
    if not given:
        return
    par = config.parallelism
    n = par.context_parallel_size
    messages = configured_mode(par).num_messages(n, config.data.seq_length)
    if messages > _MAX_MESSAGES:
        expected = f"a plan of at most {_MAX_MESSAGES:,} messages; {par.schedule} has {messages:,} here"
        raise refuse(option, given, expected, "Take fewer context-parallel ranks.")


def _check_picture(option: str, picture: Path | None) -> None:
    if picture and (picture.suffix != ".png" or not picture.parent.is_dir()):
        remedy = f"Put settings before {option}." if "=" in str(picture) else "Give another file name."
        raise refuse(option, picture, "a .png file in a folder that exists", remedy)
