"""Convergence rates: exponents in L and H, with intervals, from a table of errors.

The errors of a run are read by `table`; `noise` resamples the seeds; `leastsquares` holds the one
estimator behind every random fit; `choices` holds what is fixed before the data are seen; `cells`
chooses which of them a fit uses; `single` fits one exponent, `joint` the model a/L + b L^-g H^-h;
`share` bounds what of a fluctuation may fall more slowly than -1/2, by the `profile` of its
likelihood; `fit` walks through a table and collects what came out; `paired` compares two tables
that share their draws. `trend` fits the slope of an error in any other size, such as the number of
tokens; `parts` fits how large the parts of known rates are, and what remains beside them;
`constant` compares the fluctuation with its prediction, without a fit, and fits the
prediction's own trend in L.
"""

from .constant import constant_ratios, constant_trends
from .fit import RateFits, fit_rates
from .joint import JointFit
from .paired import MARGIN, Difference, equivalence, exponent_differences
from .parts import Parts, fit_parts
from .share import Share
from .single import RateFit
from .trend import Trend, fit_slopes, fit_trend

__all__ = [
    "MARGIN",
    "Difference",
    "JointFit",
    "Parts",
    "RateFit",
    "RateFits",
    "Share",
    "Trend",
    "constant_ratios",
    "constant_trends",
    "equivalence",
    "exponent_differences",
    "fit_parts",
    "fit_rates",
    "fit_slopes",
    "fit_trend",
]
