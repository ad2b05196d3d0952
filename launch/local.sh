#!/usr/bin/env bash
# Start training on this host. Arguments are passed to `megatron-longctx train`:
#
#   launch/local.sh experiment=demo
#   launch/local.sh experiment=llama3_8b_extend_128k_cp8_h200_bf16 run.name=first train.steps=100
#
# Variables:
#   VENV      virtual environment to use; default: the active one, else .venv of this checkout, else what PATH has
#   TORCHRUN  1: start the ranks with torchrun instead of letting the command start them itself
#   NPROC     ranks on this host, TORCHRUN=1 only; default: one for each GPU (torchrun's "gpu"); needed without GPUs
#   NCCL's and CUDA's: env.sh
#   CUDA_VISIBLE_DEVICES   GPUs to use; default: all
#
# The torchrun form, for several hosts without Slurm (the same line on each, HOST0 being one of them):
#
#   torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST0:29500 \
#       --no-python megatron-longctx train experiment=NAME
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="${VENV:-${VIRTUAL_ENV:-}}"
if [[ -z "$venv" && -d "$here/../.venv" ]]; then
    venv="$(cd "$here/../.venv" && pwd)"
fi
if [[ -n "$venv" ]]; then
    if [[ ! -d "$venv/bin" ]]; then
        echo "local.sh: VENV=$venv: expected a virtual environment. Run \`make setup\`, or unset VENV." >&2
        exit 2
    fi
    export PATH="$venv/bin:$PATH"
fi
if ! command -v megatron-longctx >/dev/null; then
    echo "local.sh: the command megatron-longctx is not on PATH. Run \`make setup\`, or set VENV." >&2
    exit 2
fi
# shellcheck source-path=SCRIPTDIR source=env.sh
source "$here/env.sh"

# `exec`: signals (TERM and USR1 checkpoint and stop) reach the training itself, and its exit code is ours.
if [[ "${TORCHRUN:-0}" == 1 ]]; then
    exec torchrun --standalone --nproc-per-node="${NPROC:-gpu}" --no-python megatron-longctx train "$@"
fi
exec megatron-longctx train "$@"
