"""Runs and prints all GPU checks: ``python -m tests.gpu.run``.

Under eight minutes on one GPU with 40 GB or more. With ``--device cpu --tiny`` the same code runs
on toy sizes in about a minute: its figures mean nothing, but no line waits for a GPU to be tried.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.gpu.congruence import check_congruence
from tests.gpu.measuring import Finding, Setting
from tests.gpu.models import build_shaped_model, load_bundled_model
from tests.gpu.step_times import check_step_times
from tests.gpu.throughput import check_crowd, check_drafter
from tests.gpu.two_drafters import check_two_drafters

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_large_model(setting: Setting) -> Iterator[Finding]:
    """Steps, drafting and crowds of the 8B shape, without and with CUDA graphs."""
    model = build_shaped_model(setting.device, tiny=setting.tiny)
    for graphs in (False, True):
        yield from check_step_times(model, setting, graphs=graphs)
        yield from check_drafter("8B shape, bf16", model, setting, graphs=graphs)
    yield from check_crowd(model, setting)
    yield from check_crowd(model, setting, graphs=True)


def check_bundled_drafter(setting: Setting) -> Iterator[Finding]:
    """Drafting with the bundled model, where it is installed."""
    if setting.tiny:
        model = build_shaped_model(setting.device, tiny=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = load_bundled_model(Path(folder))
        if found is None:
            yield Finding(name="bundled drafter", text="its package is not installed: left out")
            return
        model = found
    yield from check_drafter("bundled model", model, setting)
    yield from check_drafter("bundled model", model, setting, graphs=True)


CHECKS = (check_congruence, check_bundled_drafter, check_large_model, check_two_drafters)


def write(line: str) -> None:
    """Write one line of the report at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_all(setting: Setting) -> bool:
    """Run and print every check; return whether all bars were met."""
    started = time.perf_counter()
    all_passed = True
    for check in CHECKS:
        for finding in check(setting):
            mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.passed]
            elapsed = time.perf_counter() - started
            write(f"{elapsed:6.1f} s  {mark} {finding.name}: {finding.text}")
            all_passed &= finding.passed is not False
        gc.collect()
        if setting.is_cuda:
            torch.cuda.empty_cache()
    write("all bars met" if all_passed else "some bars were missed")
    return all_passed


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; figures mean nothing")
    arguments = parser.parse_args()
    setting = Setting(device=torch.device(arguments.device), tiny=arguments.tiny)
    if not setting.is_cuda and not setting.tiny:
        parser.error("no GPU was found; use --device cpu --tiny to try the checks without one")
    if setting.is_cuda:
        write(f"{torch.cuda.get_device_name(setting.device)}, torch {torch.__version__}")
    sys.exit(0 if run_all(setting) else 1)


if __name__ == "__main__":
    main()
