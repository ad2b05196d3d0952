"""The Trainer of `transformers`, and classes made from it like TRL's `SFTTrainer`, on sharded sequences."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.attention import ContextParallelAttention
from ..core.errors import refuse
from .sharded_mask import ShardedMask
from .transformers import IGNORED, documents_of, registered, shard


class ContextParallelTrainer:
    """A mix-in that shards the batches of a `Trainer`, or of a class made from it: `class Mine(This, SFTTrainer)`.

    The ranks of the attention load the same batches, and the other ranks of the job load others. Losses are those of
    the Trainer on one rank. `longctx_name` is the name of the attention.

    Raises:
        ValueError: by the constructor, for ranks that are not neighbours, for accelerate's own context parallelism, and
            for a loss that shifts labels after the cut.
    """

    longctx_name = "longctx"

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, whose data loaders give the ranks of the attention the same batches."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        args, accelerator = self.args, self.accelerator  # type: ignore[attr-defined]
        parallelism = accelerator.parallelism_config
        if parallelism is not None and parallelism.non_data_parallel_size > 1:
            expected = "none with cp_size, sp_size or tp_size above 1"
            raise refuse("parallelism_config", parallelism, expected, "Leave it out: the attention has its own group.")
        if args.label_smoothing_factor:
            remedy = "The Trainer would shift labels after they are sharded."
            raise refuse("label_smoothing_factor", args.label_smoothing_factor, "0", remedy)
        self._longctx_size = registered(self.longctx_name).world
        if self._longctx_size > 1:
            mesh = _data_mesh(accelerator.device.type, registered(self.longctx_name))
            accelerator._prepare_device_mesh = lambda: mesh  # only data loaders ask for it

    def get_cp_size(self) -> int:
        """Return the number of ranks that share a batch."""
        return self._longctx_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        for batch in batch_samples:
            if isinstance(batch.get("labels"), Tensor):
                starts = [0, *accumulate(documents_of(batch, batch["labels"].shape[1]))][:-1]
                batch["labels"][:, starts] = IGNORED  # they are never predicted, so they do not count
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def _prepare_context_parallel_inputs(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        return nullcontext, self._sharded(inputs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this rank's share of the loss, as the Trainer scales it. `inputs` may be a whole batch."""
        if self.compute_loss_func is not None:  # type: ignore[attr-defined]
            remedy = "Override compute_loss and read shift_labels."
            raise refuse("compute_loss_func", "given", "none: labels are shifted before they are sharded", remedy)
        inputs = self._sharded(inputs)
        counted = inputs.pop("num_items_in_batch", None)
        if num_items_in_batch is None and counted is not None:  # an evaluation that does not count
            averaged = self.args.average_tokens_across_devices  # type: ignore[attr-defined]
            scale = self.accelerator.num_processes if averaged else 1  # type: ignore[attr-defined]
            num_items_in_batch = counted * scale / self._longctx_size
        found = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        inputs["attention_mask"].check_asked()
        return found

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return a loss alone: of the logits, every rank has a part, which `Trainer` would join as if it were whole."""
        if not prediction_loss_only and self._longctx_size > 1:
            expected = f"True on {self._longctx_size} ranks, which have parts of the logits"
            raise refuse("prediction_loss_only", False, expected, "Leave out compute_metrics and predict.")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]

    def _sharded(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if isinstance(inputs.get("attention_mask"), ShardedMask):
            return inputs
        return shard(self._prepare_inputs(inputs), name=self.longctx_name)  # type: ignore[attr-defined]


def _data_mesh(device_type: str, attention: ContextParallelAttention) -> DeviceMesh:
    """Return the mesh by which accelerate's data loaders give the ranks of an attention the same batches."""
    world, ranks = dist.get_world_size(), dist.get_process_group_ranks(attention._group_to_send())
    n, first = len(ranks), ranks[0]
    if world % n or first % n or ranks != [*range(first, first + n)]:
        expected = f"{n} ranks in a row, as 0 to {n - 1}, of a multiple of {n}"
        raise refuse("ranks of the attention", f"{ranks} of {world}", expected, "Use another group.")
    return DeviceMesh(device_type, torch.arange(world).view(-1, n), mesh_dim_names=("dp_shard", "cp"))
