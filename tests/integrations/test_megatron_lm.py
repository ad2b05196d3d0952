"""Megatron-LM's unmodified `pretrain_gpt.py`, with its own attention on one rank and with ours on several.

`MEGATRON_LM=path make test-megatron-lm`. The first two numbers of its version must be those of the installed
Megatron-Core.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = Path(os.environ.get("MEGATRON_LM", ""))
# Megatron-LM 0.16 imports six, which Megatron-Core does not require.
MISSING = [name for name in ("six", "torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM"),
    pytest.mark.skipif(bool(MISSING), reason=f"Megatron-LM needs {', '.join(MISSING)}"),
]

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu
    --seq-length 48 --max-position-embeddings 48 --disable-bias-linear
    --normalization RMSNorm --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
    --micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr 0.02 --tokenizer-type NullTokenizer
    --vocab-size 127 --make-vocab-size-divisible-by 2 --use-cpu-initialization --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --log-interval 1 --eval-iters 0 --eval-interval 1000
    --num-workers 0"""
GROUPED = "--group-query-attention --num-query-groups 2"
ROPE = f"{GROUPED} --position-embedding-type rope"
EXPERTS = f"{ROPE} --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1] --moe-ffn-hidden-size 64"
BALANCED = f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
WINDOWS = f"{ROPE} --window-size 8,0 --softmax-type learnable"
LATENT = """--position-embedding-type rope --multi-latent-attention --kv-lora-rank 24 --qk-head-dim 12
    --qk-pos-emb-head-dim 8 --v-head-dim 16"""
LEARNED = f"{GROUPED} --position-embedding-type learned_absolute"
CP2, CP3, PP2 = "--context-parallel-size 2", "--context-parallel-size 3", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DOOR = "--spec megatron_longctx.integrations.megatron_lm"
MASKS = "--reset-attention-mask --reset-position-ids"
PACKS = "--dataloader-inter-document-masking"
ARGUMENTS = REPOSITORY / "megatron/training/arguments.py"
HAS_PACKS = ARGUMENTS.is_file() and PACKS in ARGUMENTS.read_text()
END = 126  # NullTokenizer's token behind a document
SPEC = "from megatron_longctx.integrations.megatron_lm import layer_spec\nlayer = layer_spec({})"


def _losses(folder: Path, ranks: int, *settings: str) -> list[float]:
    """Return the losses that `pretrain_gpt.py` prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "megatron_longctx.integrations.cpu", str(REPOSITORY / "pretrain_gpt.py")]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    model = " ".join([MODEL, *settings])
    run = subprocess.run(
        [*command, *model.split(), *([] if "--data-path" in model else ["--mock-data"])],
        cwd=folder,
        env={**os.environ, **hidden, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    losses = re.findall(r"lm loss: (\S+)", run.stdout + run.stderr)
    assert run.returncode == 0 and len(losses) == 5, (run.stdout + run.stderr)[-9000:]
    return [float(each) for each in losses]


@functools.cache
def _megatrons_own(folder: Path, model: str) -> list[float]:
    """Return the losses of one rank; stages of a pipeline draw other weights.

    Megatron's local attention cannot compute latent attention, so its reference is ours on one rank.
    """
    return _losses(folder, 2 if PP2 in model else 1, model, f"{DOOR} layer" if model == LATENT else "")


def _own_spec(folder: Path, options: str) -> str:
    (folder / "own_spec.py").write_text(SPEC.format(options))
    return "--spec own_spec layer"


@pytest.mark.parametrize(
    ("ranks", "model", "settings", "schedule"),
    [
        (1, ROPE, "", "zigzag"),
        (2, ROPE, CP2, "zigzag"),
        (3, ROPE, CP3, "zigzag"),
        (2, ROPE, f"{CP2} --no-create-attention-mask-in-dataloader", "all_gather"),
        (2, ROPE, CP2, "double_ring"),
        (2, ROPE, CP2, "ring"),
        (4, ROPE, f"{CP2} {TP2}", "zigzag"),
        (2, f"{ROPE} --qk-layernorm", TP2, "zigzag"),
        (2, ROPE, OVERLAPS, "zigzag"),
        (4, ROPE, f"{CP2} {OVERLAPS}", "zigzag"),
        (2, ROPE, f"{CP2} {RECOMPUTE}", "zigzag"),
        (2, f"{ROPE} {PP2}", "", "zigzag"),
        (2, EXPERTS, CP2, "zigzag"),
        (1, BALANCED, "", "zigzag"),
        (2, WINDOWS, CP2, "zigzag"),
        (2, LATENT, CP2, "zigzag"),
        (2, LEARNED, CP2, "zigzag"),
    ],
)
def test_losses_are_megatrons_own(
    root: Path, tmp_path: Path, ranks: int, model: str, settings: str, schedule: str
) -> None:
    """Balancing losses are of one rank: Megatron computes them of each rank's tokens, whichever the attention."""
    layer = "block" if "--num-experts" in model else "layer"
    spec = f"{DOOR} {layer}" if schedule == "zigzag" else _own_spec(tmp_path, f"schedule={schedule!r}")
    found = _losses(tmp_path, ranks, model, settings, spec)
    limit = 3e-5 if model == BALANCED else 1e-5  # balancing amplifies rounding
    assert found == pytest.approx(_megatrons_own(root, model), rel=limit)


def test_layouts_in_which_megatron_does_not_slice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="layout=contiguous: expected zigzag or per_document"):
        _losses(tmp_path, 2, ROPE, CP2, _own_spec(tmp_path, "layout='contiguous'"))


@pytest.fixture(scope="module")
def documents(root: Path) -> str:
    """Return the setting that names a data set of short documents."""
    indexed_dataset = importlib.import_module("megatron.core.datasets.indexed_dataset")
    prefix, generator = str(root / "documents"), torch.Generator().manual_seed(3)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=indexed_dataset.numpy.int32)
    for length in torch.randint(2, 30, (200,), generator=generator).tolist():
        tokens = torch.randint(0, END, (length,), generator=generator)
        builder.add_document(torch.cat([tokens, torch.tensor([END])]), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return f"--data-path {prefix} --split 100,0,0 --data-cache-path {root}"


@pytest.mark.skipif(not HAS_PACKS, reason="Megatron-LM 0.16 packs conversations only, which it computes on GPUs")
@pytest.mark.parametrize(("ranks", "model"), [(1, ROPE), (2, LEARNED), (3, LEARNED)])
def test_packs_are_what_masks_between_documents_are_to_megatron(
    root: Path, tmp_path: Path, documents: str, ranks: int, model: str
) -> None:
    """Megatron's own local attention refuses packs, but applies a mask tensor, which ours refuses."""
    found = _losses(tmp_path, ranks, model, documents, PACKS, f"--context-parallel-size {ranks} {DOOR} layer")
    assert found == pytest.approx(_megatrons_own(root, f"{model} {documents} {MASKS}"), rel=1e-5)
    assert found != pytest.approx(_megatrons_own(root, f"{model} {documents}"), rel=1e-3)


@pytest.mark.skipif(not HAS_PACKS, reason="Megatron-LM 0.16 has no such packs")
def test_megatrons_rope_of_packs_between_ranks_is_refused(tmp_path: Path, documents: str) -> None:
    with pytest.raises(AssertionError, match="layout=zigzag: expected"):
        _losses(tmp_path, 2, ROPE, documents, PACKS, f"{CP2} {DOOR} layer")
