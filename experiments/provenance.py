"""What a result file was made with, so that its numbers can be made again."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import numpy
import scipy
import torch

import ipslimit
from ipslimit.checks import resolve_device
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.resources import processor_name


def provenance(device: object = "auto") -> dict:
    """Versions and machine of this process, in plain types.

    Parameters
    ----------
    device : "auto", "cpu", "cuda" or "cuda:i"
        Where the numbers were computed.

    Returns
    -------
    dict
        "versions", by package, and "machine": "platform", "processor", "device", and
        "IPSLIMIT_KERNEL" if that is set.

    Notes
    -----
    There is no time and no name of a machine in it, so that equal settings give equal files. Cells
    that were found finished may come from another version or machine: it decides no cell's name,
    since what it changes is rounding.
    """
    device = resolve_device(device)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    machine = {
        "platform": platform.platform(),
        "processor": processor_name(),
        "device": f"{device}{name}",
    }
    if kernel := os.environ.get(VARIABLE):
        machine[VARIABLE] = kernel
    packages = {"torch": torch, "numpy": numpy, "scipy": scipy}
    versions = {"ipslimit": ipslimit.__version__}
    versions |= {name: str(module.__version__) for name, module in packages.items()}
    versions["numba"] = metadata.version("numba")  # which takes long to import
    versions["python"] = platform.python_version()
    return {"versions": versions, "machine": machine}
