"""The schemes by their names."""

from __future__ import annotations

from .adams import Adams
from .march import March
from .picard import Picard
from .scheme import Scheme

SCHEMES: dict[str, type[Scheme]] = {"march": March, "picard": Picard, "adams": Adams}


def name_of(scheme: Scheme) -> str:
    return next(name for name, kind in SCHEMES.items() if type(scheme) is kind)
