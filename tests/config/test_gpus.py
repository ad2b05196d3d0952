"""Ranks that share GPUs: which GPU each rank uses, and the settings of NCCL and symmetric memory."""

import os

import pytest

from megatron_longctx.config.gpus import RANKS_PER_GPU, max_gpu_ranks, ranks_per_gpu, use_gpu
from megatron_longctx.training.calibration import run

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were set, on a host of two GPUs, with none of the environment variables set."""
    for name in (RANKS_PER_GPU, "NCCL_HOSTID", "NCCL_NET", OVERLAP):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    devices: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    return devices


def test_each_rank_has_its_own_gpu(devices: list[int]) -> None:
    for rank in range(max_gpu_ranks()):
        use_gpu(rank)
    assert devices == [0, 1]
    assert "NCCL_HOSTID" not in os.environ and OVERLAP not in os.environ


def test_neighbours_share_a_gpu_and_are_different_hosts_to_nccl(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, "3")
    hosts = set()
    for rank in range(max_gpu_ranks()):
        use_gpu(rank)
        hosts.add(os.environ["NCCL_HOSTID"])
    assert devices == [0, 0, 0, 1, 1, 1] and len(hosts) == 6
    assert os.environ[OVERLAP] == "1"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_other_values_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, value)
    with pytest.raises(ValueError, match=f"{RANKS_PER_GPU}={value}: expected a whole number of at least 1"):
        ranks_per_gpu()


def test_shared_gpus_are_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    with pytest.raises(ValueError, match=f"{RANKS_PER_GPU}=2: expected a GPU for each rank"):
        run([])
