"""What the timings were taken on, and what that machine can do at best."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from ipslimit.resources import processor_name, processors

from .timing import interleave

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "numba",
    "llvmlite",
    "torchdiffeq",
    "jax",
    "optax",
    "diffrax",
)


def describe() -> dict:
    """Processor, cores, threads and versions; nothing that names the machine."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "processor": processor_name(),
        "cores": processors(),
        "threads": torch.get_num_threads(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }


def ceilings() -> dict[str, float]:
    """Matrix products in GFLOP/s, exponentials in 10^9/s, and a copy through memory in GB/s.

    The best of the rounds, not the median: a ceiling is what the machine does undisturbed.
    """
    found = {}
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        a = torch.randn(1024, 1024, dtype=dtype)
        out = torch.empty_like(a)
        small = torch.randn(2**16, dtype=dtype)  # in a core's cache
        small_out = torch.empty_like(small)
        large = torch.randn(2**27 // a.itemsize, dtype=dtype)
        large_out = torch.empty_like(large)
        samples = interleave(
            {
                "gemm": lambda a=a, out=out: torch.mm(a, a, out=out),
                "exp": lambda s=small, o=small_out: torch.exp(s, out=o),
                "copy": lambda s=large, o=large_out: o.copy_(s),
            }
        )
        best = {key: float(min(v[v == v])) for key, v in samples.items()}
        found[f"gemm {name} GFLOP/s"] = 2 * 1024**3 / best["gemm"] / 1e9
        found[f"exp {name} 1e9/s"] = small.numel() / best["exp"] / 1e9
        found[f"copy {name} GB/s"] = 2 * large.numel() * large.itemsize / best["copy"] / 1e9
    return found


def ceilings_without_cbwr() -> dict[str, float]:
    """The same in a fresh process in which MKL may round as it likes.

    `import ipslimit` asks MKL for reproducible products, of which the peers suffer (or not) too.
    """
    code = "import json; from benchmarks.machine import ceilings; print(json.dumps(ceilings()))"
    return in_fresh_process(code, MKL_CBWR="OFF")


def in_fresh_process(code: str, **environment: str):
    """Run Python code in a new process and read the JSON of the last line that it prints."""
    import json

    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if result.returncode:
        raise RuntimeError(f"a benchmark's process failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])
