"""`ipslimit rebalance`: resume a language model from rescaled checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ipslimit.checks import require_int

from ..engines.local import processors
from ..provenance import provenance
from ..store import prepare_folder, write_csv, write_figure, write_json
from ..study import Flat
from ..sweep import finite
from ..text.transformer import make_decoder
from .arms import BY_NAME
from .cells import Cells
from .report import Report, check_lines, table
from .study import RebalanceStudy

COLUMNS = ["variant", "arm", "seed", "perplexity", "gap", "restart_change", "diverged"]


@dataclasses.dataclass(frozen=True)
class RebalanceCommand:
    """Resume a small language model from rescaled checkpoints, with and without SAGGS.

    The checkpoint computes the same function however its symmetry pairs are scaled; AdamW trains
    it differently, and SAGGS undoes that. Finished runs are kept in OUT/cells: run the same
    command again to resume.
    """

    study: Annotated[RebalanceStudy, Flat] = RebalanceStudy()
    out: Path = Path("results/rebalance")
    """Folder for config.json, rebalance.json, perplexities.csv, rebalance.png and the runs."""
    workers: int = 0
    """Processes that train at once (0: one for every core)."""
    cache: str | None = None
    """Folder that keeps fetched text (default: IPSLIMIT_CACHE, or the user's cache folder)."""

    def check(self) -> None:
        self.study.check()
        require_int("workers", self.workers, 0)
        prepare_folder(self.out)

    def run(self) -> None:
        cells = Cells(self.study, self.out / "cells", self.cache)
        done = cells.run(self.workers or processors())
        report = Report(self.study, done)
        parameters = {
            variant: sum(p.numel() for p in make_decoder(self.study.shape(variant), 0).parameters())
            for variant in self.study.variants
        }
        self._write(report, cells, parameters)
        print(f"{cells.text.source}: {len(cells.tokens.train)} tokens to train on\n")
        print(table(report, parameters))
        print(check_lines(report))
        for line in cells.damaged:
            print(line)
        print(f"\nwritten to {self.out}: config.json, rebalance.json, perplexities.csv, "
              "rebalance.png, rebalance.pdf")  # fmt: skip

    def _write(self, report: Report, cells: Cells, parameters: dict[str, int]) -> None:
        from .figure import rebalance_figure  # matplotlib is slow to import

        config = provenance("cpu") | {"study": self.study.as_dict()}
        source = {"text": cells.text.source, "train_tokens": len(cells.tokens.train)}
        source |= {"held_out_tokens": len(cells.tokens.held_out), "parameters": parameters}
        write_json(self.out / "config.json", config | {"source": source})
        write_json(self.out / "rebalance.json", finite(report.as_dict()))
        write_csv(self.out / "perplexities.csv", _rows(report), COLUMNS)
        write_figure(self.out / "rebalance", rebalance_figure(report))


def _rows(report: Report) -> list[dict]:
    rows = []
    for (variant, seed, name), cell in report.cells.items():
        perplexity = report.perplexity(variant, seed, name)
        gap = perplexity - report.perplexity(variant, seed, BY_NAME[name].control)
        rows.append(
            {"variant": variant, "arm": name, "seed": seed, "perplexity": perplexity, "gap": gap}
            | {"restart_change": cell["restart_change"], "diverged": cell["diverged"]}
        )
    return rows
