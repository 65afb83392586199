"""What comes out of a comparison: files, and what a person reads."""

from __future__ import annotations

from collections.abc import Iterator

from ..frame.film import film_kinds
from ..frame.kept import plain
from ..frame.outcome import Outcome, drawing
from ..frame.style import own_style
from ..provenance import provenance
from .animation import FlowFilm
from .compared import Compared
from .comparison import DISTANCE_COLUMNS, ERROR_COLUMNS, PATH_COLUMNS, Comparison


def outcome(
    comparisons: list[Comparison],
    pair: Compared,
    device: object = "auto",
    animate: bool = False,
    panels: str = "six",
) -> Outcome:
    """The comparisons of a pair as config.json, compare.png and tables in CSV; and as a film.

    `device` computed the numbers; of `panels` see `comparison_figure`.
    """
    limits = [comparison.limit_summary() for comparison in comparisons]
    made = provenance(device) | {"pair": plain(pair)} | {"limits": limits}
    paths, errors = (
        [row for comparison in comparisons for row in rows(comparison)]
        for rows in (Comparison.path_rows, Comparison.error_rows)
    )
    distances = [row for comparison in comparisons for row in comparison.distances]
    said = [line for comparison in comparisons for line in lines(comparison)]
    films = {}
    if animate:
        with own_style():
            films["flow"] = FlowFilm(comparisons)
            kinds = film_kinds()
        said.append(films["flow"].words)
        if "mp4" not in kinds:
            said.append(
                "flow.gif and flow.html; no MP4, for which there is no ffmpeg that writes it"
            )
    return Outcome(
        "compare",
        made | {"errors": errors, "distances": distances},
        "\n".join(said),
        {"compare": drawing(f"{__package__}.figure", "comparison_figure", comparisons, panels)},
        {"config": made},
        {
            "errors": (errors, ERROR_COLUMNS),
            "distances": (distances, DISTANCE_COLUMNS),
            "paths": (paths, PATH_COLUMNS),
        },
        films=films,
        look=panels,
    )


def lines(comparison: Comparison) -> Iterator[str]:
    """What a person reads of the limit, the particles, and the errors at every recorded step."""
    limit, rule = comparison.limit, comparison.rule
    yield f"{rule}, limit: {limit.message}, {limit.grid.elements} elements"
    for note in limit.notes:
        yield f"{rule}, limit: {note}"
    if limit.quadrature_error:
        yield (
            f"{rule}, limit: quadrature error over heads {limit.quadrature_error:.1e} (largest "
            f"component) with {limit.nodes} nodes: raise --nodes to lower it"
        )
    yield f"{rule}, particles: {comparison.run.status}"
    for note in comparison.run.notes:
        yield f"{rule}, particles: {note}"
    rows = comparison.error_rows()
    for step, variable in comparison.cases():
        chosen = [row for row in rows if (row["step"], row["variable"]) == (step, variable)]
        worst = max(chosen, key=lambda row: row["rms"])
        quadrature = worst["quadrature_error"]
        note = f", quadrature error of the limit {quadrature:.1e}" if quadrature else ""
        yield f"step {step} {variable}: rms error {worst['rms']:.3e} at layer {worst['r']}{note}"
    for step, variable in dict.fromkeys((r["step"], r["variable"]) for r in comparison.distances):
        chosen = comparison.distances_of(step, variable)
        worst = max(chosen, key=lambda row: row["w2"])
        what = "token clouds" if variable == "x" else variable
        exact = "" if worst["exact"] else " at least"
        yield f"step {step} W2 of {what}:{exact} {worst['w2']:.3e} at layer {worst['r']}"
