"""The machine's limits: float32 matrix products and memory reads per second, with all threads."""

import json
import time
from collections.abc import Callable

import torch
from job import read_job


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    torch.set_num_threads(read_job()["threads"])
    size = 2048
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    gemm = 2 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), 10)
    block = torch.ones(1 << 27)
    read = block.nbytes / best_seconds(block.sum, 10)
    print(json.dumps({"gemm_gflops": gemm / 1e9, "memory_read_gbytes": read / 1e9}))


main()
