# Environment of every rank, sourced by local.sh and job.sh. What you have set yourself stays. shellcheck shell=bash

default() { # NAME VALUE
    if [[ -z "${!1+set}" ]]; then export "$1=$2"; fi
}

# A collective that fails or times out ends its rank instead of hanging it; how long one may take is
# parallelism.timeout_s. It is PyTorch's default today, and what "a lost node never hangs the job" rests on.
default TORCH_NCCL_ASYNC_ERROR_HANDLING 1
# Seconds that torchrun (PyTorch 2.13 on) leaves ranks to checkpoint after TERM. Its default is 30.
default TORCH_ELASTIC_SHUTDOWN_TIMEOUT 240
# One line for what goes wrong inside NCCL. INFO shows which network and which links it takes.
default NCCL_DEBUG WARN
# What a rank prints comes at once, also into a file: the last line before a crash is the one that counts.
default PYTHONUNBUFFERED 1

# Not set: the right value is your cluster's:
#   GLOO_SOCKET_IFNAME   interface of the CPU groups. Ranks take the one that leads to MASTER_ADDR
#   NCCL_SOCKET_IFNAME   interface of NCCL's rendezvous, where it takes a wrong one, e.g. "=bond0"
#   NCCL_IB_HCA          InfiniBand adapters to use, e.g. "mlx5_0,mlx5_1"
#   NCCL_IB_TIMEOUT      raise to 22 on large fabrics that report "transport retry counter exceeded"
#   CUDA_DEVICE_MAX_CONNECTIONS   1 where Megatron asks for it (tensor parallelism overlapped, GPUs before Blackwell)
#   NCCL_NVLS_ENABLE     0 where NCCL fails to set up NVLink multicast
