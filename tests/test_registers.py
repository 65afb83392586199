"""How products are cut follows from the processor's registers, and changes no bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipslimit.cpu import registers

AVX512, AVX2, SSE, NEON = (32, 64), (16, 32), (16, 16), (32, 16)


@pytest.mark.parametrize(
    "machine,shapes",
    [
        # of eight floats, eight doubles or sixteen floats
        (AVX512, {32: (4, 4), 64: (4, 4)}),
        (AVX2, {32: (4, 2), 64: (2, 2)}),
        (SSE, {32: (2, 2), 64: (2, 1)}),
        (NEON, {32: (4, 2), 64: (2, 2)}),
    ],
)
def test_sums_and_what_enters_them_stay_in_registers(monkeypatch, machine, shapes):
    monkeypatch.setattr(registers, "registers", lambda: machine)
    count, size = machine
    for vector, (rows, columns) in shapes.items():
        assert registers.tile_sizes(vector) == (rows, columns)
        assert (rows * columns + columns + 1) * max(1, vector // size) <= count


@pytest.mark.parametrize(
    "features,machine,expected",
    [
        ({"avx": True, "avx2": True, "avx512f": True, "avx512vl": True}, "x86_64", AVX512),
        ({"avx": True, "avx2": True, "avx512f": True, "avx512vl": False}, "x86_64", AVX2),
        ({"avx": True, "avx2": True}, "AMD64", AVX2),
        ({"sse2": True}, "x86_64", SSE),
        ({"neon": True}, "aarch64", NEON),
        (None, "arm64", NEON),
    ],
)
def test_registers_are_those_of_the_processor(monkeypatch, features, machine, expected):
    def found():
        if features is None:
            raise RuntimeError("no features")
        return features

    monkeypatch.setattr(registers.llvmlite.binding, "get_host_cpu_features", found)
    monkeypatch.setattr(registers.platform, "machine", lambda: machine)
    assert registers.registers.__wrapped__() == expected


BITS = """
import hashlib, sys
from ipslimit.cpu import registers
registers.registers = lambda: (int(sys.argv[1]), int(sys.argv[2]))
import torch
from builders import normal, random_heads
from perceptron_units import random_perceptrons
said = hashlib.sha256()
for dtype in (torch.float32, torch.float64):
    for units in (random_heads((2,), 11, 5, 7), random_perceptrons((2,), H=11, n=4, d=7)):
        x, c = (normal(2, 3, 9, 7, seed=seed).to(dtype) for seed in (1, 2))
        units = units.to(dtype)
        dx, dunits = units.vjp(x, c)
        for t in (units.field(x), dx, dunits.packed, dunits.weights):
            said.update(t.numpy().tobytes())
print(said.hexdigest())
"""


@pytest.mark.slow
def test_the_cut_changes_no_bit(tmp_path):
    found = set()
    for machine in (AVX512, AVX2, SSE):
        command = [sys.executable, "-c", BITS, *map(str, machine)]
        kept = {"NUMBA_CACHE_DIR": str(tmp_path / str(machine)), "IPSLIMIT_KERNEL": "fused"}
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            env=os.environ | kept,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
