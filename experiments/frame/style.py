"""How figures look: as matplotlib has it by default, whatever a user's matplotlibrc says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ..store import CannotWrite

# Where programs lie is the user's to say.
KEPT = ("animation.ffmpeg_path",)


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Figures that are made and drawn inside have matplotlib's own defaults, and ours.

    LaTeX or fonts that are not there, and lines of a matplotlibrc that matplotlib does not know,
    neither end nor flood a run; Agg draws, whatever backend is asked for, as no window is opened.

    Raises
    ------
    CannotWrite
        If matplotlib cannot be imported because of that file.
    """
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # while it reads that file: a line for each that it does not know
    try:
        import matplotlib
    except (UnicodeDecodeError, ValueError) as error:
        raise CannotWrite(
            f"figures cannot be drawn: matplotlib cannot read its matplotlibrc ({error}); what is "
            "finished is kept. Mend that file, and run the same command again to resume."
        ) from None
    finally:
        log.setLevel(level)
    with matplotlib.rc_context():
        kept = {name: matplotlib.rcParams[name] for name in KEPT}
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(kept)
        yield
