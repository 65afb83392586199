"""Compile the card's kernels without a card: registers, spills and seconds a shape.

    python -m benchmarks.card_registers

The very calls that a card would get are made on tensors without memory, for an sm_90 target;
nothing is run. Triton must not interpret (TRITON_INTERPRET unset), and keeps nothing.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import tempfile
from pathlib import Path

# (N, d, m, H), of heads by lanes and by tiles
SHAPES = ((8, 4, 4, 64), (16, 8, 8, 64), (64, 64, 64, 8), (128, 64, 64, 8))
ARCHITECTURE = 90


class NoCard:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device) -> int:
        return 0


def compiled_in(work) -> list[tuple[str, object, float]]:
    """(name, compiled kernel, CPU seconds) of every kernel that `work()` would launch first."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, run = {}, JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **named):
        began = _seconds()
        kernel = run(self, *arguments, grid=grid, warmup=True, **named)
        found.setdefault(kernel.hash, (self.fn.__name__, kernel, _seconds() - began))
        return kernel

    driver.set_active(NoCard())
    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = run
    return list(found.values())


def registers_of(kernel) -> tuple[int, int, int]:
    """Registers a thread, bytes of spill stores and of spill loads, by ptxas."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).with_name("bin")
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        assembler = folder / "ptxas-blackwell"  # the newer one, of all architectures
        options = ["-v", f"-arch=sm_{ARCHITECTURE}a", source, "-o", Path(place) / "kernel.cubin"]
        said = subprocess.run([assembler, *options], capture_output=True, text=True, check=True)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.stderr)
    return int(re.search(r"Used (\d+) registers", said.stderr)[1]), int(spills[1]), int(spills[2])


def work_on(N: int, d: int, m: int, H: int, dtype) -> None:
    """A field, a transpose; and of small heads a training step and a march; with two biases."""
    import torch

    from ipslimit import AdamW, Heads
    from ipslimit.card import on_tensors, on_tiles
    from ipslimit.card.sizes import path_for
    from ipslimit.card.swept_layers import SweptLayers
    from ipslimit.model.branch import Branch
    from ipslimit.model.layers import Training
    from ipslimit.model.sight import Sight
    from ipslimit.solvers.grid import DepthGrid
    from ipslimit.solvers.march import March
    from ipslimit.solvers.march_swept import SweptMarch
    from ipslimit.solvers.scheme import System, UnitSums

    layout, L, R, B = Heads.make_layout(("bq", "bv"), d=d, m=m), 4, 2, 4

    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, device="meta")

    units = Heads.from_packed(empty(L, R, layout.size, H), empty(L, R, H), layout)
    x, one = empty(R, B, N, d), units[0]
    small = path_for(d, m, dtype) == "lanes"
    path = on_tensors if small else on_tiles
    path.field(x, one.packed, one.weights, layout, Sight())
    path.vjp(x, one.packed, one.weights, x, layout, Sight(), True)
    if not small:
        return
    rule, branch = AdamW(0.01), Branch.alone(units)
    layers = SweptLayers(branch, 1 / L, {"field": 0, "vjp": 0})
    alive = torch.ones(R, dtype=torch.bool, device="meta")
    training = Training(rule, branch.init(rule), 1, 1.0, alive)
    layers.backward(layers.forward(x, Sight()), x, False, Sight(), training)
    grid = DepthGrid.uniform(1)
    nodes = Branch.alone(units[: len(grid.nodes), 0])
    sweep = SweptMarch(System(grid, nodes, Sight(), {"field": 0, "vjp": 0}), March)
    values, states = (empty(n, B, N, d) for n in (2, len(grid.nodes)))
    sweep.forward(values, values)
    sweep.backward(states, values, values, UnitSums.room(sweep.system))


def _seconds() -> float:
    """CPU seconds of this process and those it started: a busy machine does not change them."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(t.ru_utime + t.ru_stime for t in times)


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        import torch

        print("| dtype | N, d, m, H | kernel | registers | spill stores, loads | CPU s |")
        print("|---|---|---|---|---|---|")
        for dtype in (torch.float32, torch.float64):
            for sizes in SHAPES:
                for name, kernel, seconds in compiled_in(lambda: work_on(*sizes, dtype)):  # noqa: B023
                    registers, stores, loads = registers_of(kernel)
                    shape = ", ".join(map(str, sizes))
                    kind = str(dtype).removeprefix("torch.")
                    row = f"| {kind} | {shape} | {name.strip('_')} | {registers} | "
                    print(f"{row}{stores}, {loads} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
