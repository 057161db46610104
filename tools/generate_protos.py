"""Generate the Python code of the contracts, or check that the committed code is current.

Usage: python tools/generate_protos.py [--check]
"""

from __future__ import annotations

import filecmp
import importlib.resources
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "protos"
PACKAGE_DIR = ROOT / "libs/common/src"
GENERATED = Path("specrag/v1")
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(target: Path) -> None:
    """Write messages, services and their type stubs for every proto file under ``target``."""
    well_known = str(importlib.resources.files("grpc_tools").joinpath("_proto"))
    scripts = Path(sys.executable).parent
    sources = sorted(str(path) for path in (PROTO_DIR / GENERATED).glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            *(f"--plugin={name}={scripts / name}" for name in PLUGINS),
            f"--proto_path={PROTO_DIR}",
            f"--proto_path={well_known}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ]
    )
    if status != 0:
        sys.exit(f"protoc failed with status {status}")
    for package in (GENERATED.parent, GENERATED):
        init = target / package / "__init__.py"
        init.write_text('"""Generated from protos/: edit there, then run `make protos`."""\n')
        (target / package / "py.typed").touch()


def stale_files(fresh: Path) -> list[str]:
    """Return the names of generated files that differ from the committed ones."""
    names = {path.name for path in (fresh / GENERATED).iterdir()}
    committed = PACKAGE_DIR / GENERATED
    names |= {path.name for path in committed.iterdir() if path.is_file()}
    _, changed, missing = filecmp.cmpfiles(fresh / GENERATED, committed, sorted(names), False)
    return sorted(changed + missing)


def main() -> None:
    """Regenerate, or with ``--check`` exit 1 and name every stale file."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if "--check" in sys.argv[1:]:
            stale = stale_files(fresh)
            if stale:
                sys.exit(f"generated code is stale, run `make protos`: {', '.join(stale)}")
            return
        target = PACKAGE_DIR / GENERATED
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            fresh / GENERATED.parent, PACKAGE_DIR / GENERATED.parent, dirs_exist_ok=True
        )


if __name__ == "__main__":
    main()
