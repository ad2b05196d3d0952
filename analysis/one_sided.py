"""One-sided transports beside this package's, on 2 GPUs of one host: `python -m analysis.one_sided --out FILE.json`.

Two ranks exchange a block in every step, as in a ring, alone and beside a matrix product that is issued first. Each way
of sending has processes of its own, which check what they receive and then measure in turns. A way that fails is listed
with its error. Ways that end in `apart` run as if on two hosts whose network has sockets alone.
"""

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from analysis.benchmarks.report import Report, check_least, numbers, table
from megatron_longctx.core.comm import choose_transport
from megatron_longctx.core.comm.device import synchronize
from megatron_longctx.core.comm.symmetric import symmetric_memory
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.plans.plan import ALL_HEADS, Block, Kind
from megatron_longctx.core.plans.recording import Receive, Recording
from megatron_longctx.core.plans.send_layout import Region, SendLayout, SentMessage
from megatron_longctx.training.ranks import world_group

MOST_STEPS, CELL_S = 20, 0.06
"""A measurement has at most this many steps, and lasts about this long."""
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NVSHMEM_DISABLE_P2P": "1"}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class Ours:
    """This package's transport `name`: a pass with one step per exchange."""

    def __init__(self, name: str, device: torch.device, num_bytes: int) -> None:
        self._transport = choose_transport(name, world_group(), device)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._received, self._channels = torch.empty_like(self._memory), dict[int, Any]()

    def begin(self, n: int) -> Tensor:
        """Begin a step on the caller's stream, and return the `n` bytes that it sends, to be filled there."""
        if n not in self._channels:
            me, peer = dist.get_rank(), 1 - dist.get_rank()
            message = SentMessage(Block(Kind.KV, me, 0, n), peer, 0, 0, passed=False)
            sends = SendLayout((Region(Kind.KV, ALL_HEADS, n, (0,), (1,)),), ((message,),), n, ((),), {}, {})
            receives = ((Receive(Block(Kind.KV, peer, 0, n), peer, None, ((0, n),)),),)
            recording = Recording(me, n, False, (), {}, (), sends, receives, ((),), (), {})
            self._channels[n] = self._transport.channel(recording, n, lambda size: self._memory[:size])
        self._channel = self._channels[n]
        self._channel.begin()
        sent: Tensor = self._channel.memory()[:n]
        return sent

    def start(self, n: int, after: Any) -> None:
        """Start the exchange of `n` bytes behind the event `after`."""
        self._into = self._received[:n]
        self._exchange = self._channel.start(0, [], [self._into], [after])

    def wait(self) -> Tensor:
        """Make the caller's stream wait for the peer's bytes, and return them. They may be read there until `start`."""
        self._channel.wait(self._exchange)
        return self._into


class Put:
    """A way that writes to the peer's memory. Of two buffers, one is reused when the peer has confirmed that it read
    it. Both ranks do the same, so exchange i is the same for both."""

    def __init__(self, name: str, device: torch.device, num_bytes: int) -> None:
        if device.type != "cuda":
            raise refuse("--ways", name, "CUDA devices", "Choose p2p.")
        self.me, self.peer, self.size = dist.get_rank(), 1 - dist.get_rank(), num_bytes
        self.device, self.stream, self.i = device, torch.cuda.Stream(device), -1  # type: ignore[no-untyped-call]
        self.sent, self.received = self.allocate()
        synchronize(device)
        dist.barrier()

    def allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the two buffers of bytes to send from, and the two in which the peer's bytes arrive."""
        raise NotImplementedError

    def exchange(self, n: int, i: int) -> None:
        """On the current stream, confirm exchange i - 1, await that of i - 2, write `n` bytes, await the peer's."""
        raise NotImplementedError

    def begin(self, n: int) -> Tensor:
        self.i += 1
        return self.sent[self.i % 2][:n]

    def start(self, n: int, after: Any) -> None:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            self.exchange(n, self.i)
        self.n = n

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.received[self.i % 2][: self.n]


class CudaPut(Put):
    """torch's symmetric memory: the copy engine writes; kernels signal and wait."""

    def allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        memory = symmetric_memory().empty(4, self.size, dtype=torch.uint8, device=self.device)
        self.handle = symmetric_memory().rendezvous(memory, world_group())
        self.remote = self.handle.get_buffer(self.peer, memory.shape, torch.uint8)[2:]
        return list(memory[:2]), list(memory[2:])

    def exchange(self, n: int, i: int) -> None:
        if i >= 1:
            self.handle.put_signal(self.peer, 2 + (i - 1) % 2)
        if i >= 2:
            self.handle.wait_signal(self.peer, 2 + i % 2)
        self.remote[i % 2][:n].copy_(self.sent[i % 2][:n])
        self.handle.put_signal(self.peer, i % 2)
        self.handle.wait_signal(self.peer, i % 2)


class NvshmemPut(Put):
    """torch's symmetric memory over NVSHMEM. A put writes to its own address at the peer, so a rank receives in other
    buffers than those from which it sends. There is no signal without data."""

    def allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        memory, group = symmetric_memory(), world_group().group_name
        memory.set_backend("NVSHMEM")
        memory.enable_symm_mem_for_group(group)  # torch 2.11 requires it
        blocks = memory.empty(2, 2, self.size, dtype=torch.uint8, device=self.device)
        self.signals = memory.empty(3, 2, 2, dtype=torch.int64, device=self.device)  # [2]: the data of confirmations
        for tensor in (blocks, self.signals):
            memory.rendezvous(tensor, group)
        self.signals.zero_()
        return list(blocks[self.me]), list(blocks[self.peer])

    def exchange(self, n: int, i: int) -> None:
        put, await_signal = torch.ops.symm_mem.nvshmem_put_with_signal, torch.ops.symm_mem.nvshmem_wait_for_signal
        arrived, confirmed, nothing = self.signals[:3]
        if i >= 1:
            put(nothing[self.me], confirmed[self.me, (i - 1) % 2], i, self.peer)
        if i >= 2:
            await_signal(confirmed[self.peer, i % 2], i - 1, self.peer)
        put(self.sent[i % 2][:n], arrived[self.me, i % 2], i + 1, self.peer)
        await_signal(arrived[self.peer, i % 2], i + 1, self.peer)


class NcclId(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = (("bytes", ctypes.c_byte * 128),)


class Bytes:
    """Device memory for `torch.as_tensor`."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


class NcclPut(Put):
    """NCCL's ncclPutSignal, ncclSignal and ncclWaitSignal. A pair of ranks has a single counter of signals, so puts and
    confirmations are told apart by their order."""

    def allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        self.library, version = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
        self.communicator, address, self.window = (ctypes.c_void_p() for _ in range(3))
        self.call("ncclGetVersion", ctypes.byref(version))
        if not hasattr(self.library, "ncclPutSignal"):
            raise RuntimeError(f"ncclPutSignal is not in this NCCL ({version.value}), but from 22900 on")
        key = NcclId()
        self.call("ncclGetUniqueId", ctypes.byref(key))
        keys = [bytes(key)]
        dist.broadcast_object_list(keys, src=0)
        key, size = NcclId.from_buffer_copy(keys[0]), ctypes.c_size_t(4 * self.size)
        self.call("ncclCommInitRank", ctypes.byref(self.communicator), 2, key, self.me)
        self.call("ncclMemAlloc", ctypes.byref(address), size)
        self.call("ncclCommWindowRegister", self.communicator, address, size, ctypes.byref(self.window), 1)  # symmetric
        memory = torch.as_tensor(Bytes(address.value or 0, (4, self.size)), device=self.device)
        return list(memory[:2]), list(memory[2:])

    def exchange(self, n: int, i: int) -> None:
        on = (self.communicator, ctypes.c_void_p(self.stream.cuda_stream))
        if i >= 1:
            self.call("ncclSignal", self.peer, 0, 0, 0, *on)
        source, at = ctypes.c_void_p(self.sent[i % 2].data_ptr()), ctypes.c_size_t((2 + i % 2) * self.size)
        self.call("ncclPutSignal", source, ctypes.c_size_t(n), 1, self.peer, self.window, at, 0, 0, 0, *on)
        # ncclWaitSignalDesc_t: from i = 1 on, the peer has confirmed i - 1 before its bytes arrive.
        self.call("ncclWaitSignal", 1, (ctypes.c_int * 4)(2 if i else 1, self.peer, 0, 0), *on)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            self.library.ncclGetLastError.restype = ctypes.c_char_p
            why = self.library.ncclGetLastError(None) or b""
            raise RuntimeError(f"{name} returned {code}: {why.decode().strip()}")


WAYS: dict[str, type[Ours | Put]] = {"p2p": Ours, "peer": Ours, "cuda": CudaPut, "nvshmem": NvshmemPut, "nccl": NcclPut}
DEFAULT = ",".join((*WAYS, "p2p apart", "nvshmem apart", "nccl apart"))


class Steps:
    """The steps of one way on this rank. `group` starts the measurements of both ranks, over gloo."""

    def __init__(self, way: str, device: torch.device, num_bytes: int) -> None:
        name, self.device, size = way.split()[0], device, 8192 if device.type == "cuda" else 256
        # Not NCCL beside the way nccl, whose library may lack the kernels.
        dist.init_process_group("nccl" if device.type == "cuda" and name != "nccl" else "gloo")
        self.group = dist.new_group(backend="gloo")
        self.product = [torch.randn(size, size, device=device).bfloat16() for _ in range(3)]
        self.way = WAYS[name](name, device, num_bytes)

    def step(self, n: int, beside: bool, sent: Tensor | None = None) -> Tensor:
        """Exchange `n` bytes, `sent` if given, and return the peer's; if n is 0, only compute."""
        if n and sent is not None:
            self.way.begin(n).copy_(sent)
        elif n:
            self.way.begin(n)
        after = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        if beside:
            torch.mm(*self.product[:2], out=self.product[2])
        if n:
            self.way.start(n, after)
        return self.way.wait() if n else self.product[2]

    def check(self, sizes: Sequence[int]) -> None:
        """Raise RuntimeError if a received byte differs from what the peer sent."""
        for n, beside in product(sizes, (False, True)):
            me, both = dist.get_rank(), [torch.Generator(self.device).manual_seed(rank) for rank in range(2)]
            settings: dict[str, Any] = {"dtype": torch.uint8, "device": self.device}
            pairs = [[torch.randint(256, (n,), generator=one, **settings) for one in both] for _ in range(5)]
            wrong = sum((self.step(n, beside, pair[me]) != pair[1 - me]).sum() for pair in pairs)
            if wrong:
                raise RuntimeError(f"{int(wrong)} of {5 * n} received bytes are not what the peer sent")

    def seconds(self, n: int, beside: bool, full: bool) -> list[float]:
        """Return the seconds of steps: their mean with a full queue, and one by one from an empty queue."""

        def run(count: int) -> float:
            synchronize(self.device)
            dist.barrier(self.group)
            began = time.perf_counter()
            for _ in range(count):
                self.step(n, beside)
            synchronize(self.device)
            return (time.perf_counter() - began) / count

        longest = torch.tensor(max(run(2), run(2)))
        dist.all_reduce(longest, dist.ReduceOp.MAX, self.group)
        count = max(3, min(MOST_STEPS, int(CELL_S / float(longest))))
        return [run(count)] if full else [run(1) for _ in range(count)]


def serve(way: str, device: torch.device, sizes: Sequence[int]) -> None:
    """Check, then answer the measurements that standard input asks for, a JSON line each; an error is an answer too."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print there
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        steps = Steps(way, device, max(sizes))
        steps.check(sizes)
        print(json.dumps([]), file=answers)
        for line in sys.stdin:
            print(json.dumps(steps.seconds(**json.loads(line))), file=answers)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}".split("\n", 1)[0]), file=answers)
    os._exit(0)  # libraries may wait for a peer that has failed


class Pair:
    """The processes of one way. `error` says why there are none any more."""

    def __init__(self, way: str, arguments: argparse.Namespace, logs: Path) -> None:
        self.way, self.error, self._patience = way, "", arguments.patience
        self._logs = [logs / f"{way} {rank}" for rank in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env = {**os.environ, **NO_MULTICAST, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        if way.startswith("nccl") and arguments.nccl:
            env["LD_PRELOAD"] = str(arguments.nccl)
        command = [sys.executable, "-m", "analysis.one_sided", f"--serve={way}", f"--device={arguments.device}"]
        command.append(f"--sizes-kib={arguments.sizes_kib}")
        self._ranks = []
        for rank, log in enumerate(self._logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {**APART, "NCCL_HOSTID": f"host{rank}"} if way.endswith("apart") else {}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("w")}
            self._ranks.append(subprocess.Popen(command, env=env | own, text=True, bufsize=1, **pipes))

    def ask(self, cell: dict[str, Any] | None, since: float) -> list[list[float]]:
        """Return the answers of the ranks to what was asked at the time `since`; after an error, none."""
        if self.error:
            return []
        with ThreadPoolExecutor(2) as pool:
            for rank in self._ranks:
                if cell is not None:
                    print(json.dumps(cell), file=rank.stdin)
            lines = [pool.submit(rank.stdout.readline) for rank in self._ranks if rank.stdout]
            late = wait(lines, max(1.0, since + self._patience - time.monotonic())).not_done
            if late:
                self.end()  # which ends the reading, too
        answers = [json.loads(line.result() or '""') for line in lines]
        if all(isinstance(answer, list) for answer in answers):
            return answers
        said = [line for log in self._logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        unknown = f"no answer within {self._patience:g} s" if late else "ended without an answer"
        unknown += f"; last words: {' / '.join(said[-3:])[-400:]}"
        self.error = next((each for each in answers if each and isinstance(each, str)), unknown)
        self.end()
        return []

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def measure(pairs: Sequence[Pair], cells: Sequence[dict[str, Any]], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Yield, after every round, the medians of all cells by way. The ways take turns."""
    samples: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds):
        for (i, cell), pair in product(enumerate(cells), pairs if turn % 2 == 0 else pairs[::-1]):
            # Of the two ranks, the one that starts last does not wait for the other to start.
            least = list(map(min, zip(*pair.ask(cell, time.monotonic()), strict=True)))
            samples.setdefault((pair.way, i), []).extend(least)
        found = [(way, cells[i], times) for (way, i), times in samples.items() if times]
        yield [{"way": w, **cell, "seconds": statistics.median(t), "samples": len(t)} for w, cell, t in found]


def describe(measured: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], errors: dict[str, str]) -> str:
    """Return Markdown with a row per cell and a column per way, and the errors."""
    found = {(each["way"], *(each[key] for key in cells[0])): f"{1000 * each['seconds']:.3f}" for each in measured}
    ways, rows = list(dict.fromkeys(way for way, *_ in found)), []
    for cell in cells:
        words = (f"{cell['n'] / 2**20:g} MiB", "matrix product" if cell["beside"] else "-")
        queue = "full" if cell["full"] else "empty"
        rows.append([*words, queue, *(found.get((way, *cell.values()), "-") for way in ways)])
    return "\n\n".join([table(["block", "beside", "queue", *ways], rows), *(f"- {w}: {e}" for w, e in errors.items())])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("one_sided.json"))
    parser.add_argument("--ways", default=DEFAULT, help="default: %(default)s")
    parser.add_argument("--sizes-kib", default="1024,4096,16384,65536", help="of a block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--patience", type=float, default=40, help="seconds after which a way has failed")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 for the way nccl (default: that of torch)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for way in arguments.ways.split(","):
        if way.removesuffix(" apart") not in WAYS:
            raise refuse("--ways", way, f"some of {DEFAULT}", "Correct it.")
    check_least("--rounds", arguments.rounds)
    sizes = [1024 * kib for kib in numbers("--sizes-kib", arguments.sizes_kib, 1)]
    if arguments.serve:
        device = f"cuda:{os.environ['RANK']}" if arguments.device == "cuda" else "cpu"
        serve(arguments.serve, torch.device(device), sizes)
    queues = product((True, False), (False, True), (0, *sizes))
    cells = [{"n": n, "beside": beside, "full": full} for full, beside, n in queues if n or beside]
    what = "seconds of a step of two ranks, n: bytes that each of them sends, beside: with a matrix product"
    about = "blocks exchanged by 2 ranks, two-sided and one-sided"
    report = Report(arguments.out, arguments.device, what, about, f"ms of a step, medians in {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as logs:
        pairs = [Pair(way, arguments, Path(logs)) for way in arguments.ways.split(",")]
        try:
            began, text = time.monotonic(), ""
            for pair in pairs:
                pair.ask(None, began)
            for measured in measure(pairs, cells, arguments.rounds):
                errors = {pair.way: pair.error for pair in pairs if pair.error}
                data = {"measurements": measured, "errors": errors}
                text = report.write(data, describe(measured, cells, errors))
        finally:
            for pair in pairs:
                pair.end()
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
