"""`ipslimit gauge`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from ipslimit.checks import require_int, resolve_device

from ..engines import choose_engine
from ..provenance import provenance
from ..store import Cells, prepare_folder, write_cell, write_csv, write_figure, write_json
from ..study import Flat
from ..sweep import finite
from ..together import write_together
from .result import COLUMNS, GaugeResult
from .study import FORM, TREATMENTS, GaugeStudy, measure, train


@dataclasses.dataclass(frozen=True)
class GaugeCommand:
    """How much training depends on the gauge of the initial law, with and without balancing.

    Laws that differ by rescalings of Q against K and of V against O have the same field. Trained
    by AdamW they part, in the particle transformer and in its limit; balanced, they do not.
    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    study: Annotated[GaugeStudy, Flat] = GaugeStudy()
    out: Path = Path("results/gauge")
    """Folder for config.json, gauge.json, gauge.csv, gauge.png and the runs."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int | None = None
    """Worker processes, 1 for none (default: one a processor)."""
    scheduler: str | None = None
    """Compute on the workers of this Dask scheduler, tcp://host:port."""

    def check(self) -> None:
        self.study.check()
        if self.workers is not None:
            require_int("workers", self.workers)
        prepare_folder(self.out)
        resolve_device(self.device)

    def run(self) -> None:
        cells = Cells(self.out / "cells")
        result = self._measure(cells)
        self._write(result)
        print(result.summary())
        for text in cells.damaged:
            print(f"damaged result file: {text}")
        print(f"\nwritten to {self.out}: config.json, gauge.json, gauge.csv, gauge.png, "
              "gauge.pdf")  # fmt: skip

    def _measure(self, cells: Cells) -> GaugeResult:
        """All runs of the study; those that are not kept yet are computed."""
        runs = self.study.runs()
        engine = choose_engine(self.workers, self.scheduler)
        shared = (self.study, self.device)
        bar = tqdm(total=len(TREATMENTS) + len(runs), desc="gauge", unit="run", dynamic_ncols=True)

        def all_of(function, shared: tuple, runs: list) -> dict:
            paths = {run: self._path(cells, run) for run in runs}
            done = {run: found for run, path in paths.items() if (found := cells.read(path, FORM))}
            bar.update(len(done))
            missing = {run: run for run in runs if run not in done}
            for run, found in engine.run(function, shared, missing) if missing else ():
                write_cell(paths[run], finite(found))
                done[run] = found
                bar.update()
            return {run: _numbers(done[run]) for run in runs}

        with bar:
            base = all_of(train, shared, [(treatment, 1.0, 0) for treatment in TREATMENTS])
            as_it_is = {treatment: base[treatment, 1.0, 0] for treatment in TREATMENTS}
            measured = all_of(measure, (*shared, as_it_is), runs)
        return GaugeResult(self.study, as_it_is, measured)

    def _path(self, cells: Cells, run: tuple) -> Path:
        fields = dataclasses.asdict(self.study)
        # what other runs there are decides nothing
        key = {name: value for name, value in fields.items() if name not in ("factors", "gauges")}
        return cells.path("-".join(map(str, run)), key)

    def _write(self, result: GaugeResult) -> None:
        from .figure import gauge_figure  # matplotlib is slow to import

        study = dataclasses.asdict(self.study)
        rows = result.rows()
        numbers = {"rows": rows, "notes": result.notes(), "limit_error": result.limit_error}
        with write_together(self.out, "gauge") as staged:
            write_json(staged / "config.json", provenance(self.device) | {"study": study})
            write_csv(staged / "gauge.csv", rows, COLUMNS)
            write_json(staged / "gauge.json", finite(numbers))
            write_figure(staged / "gauge", gauge_figure(result))


def _numbers(value):
    """The inverse of `finite`: NaN and infinities as floats again; other text stays."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
