"""Download of wheels for a machine without a network, with a limit on their total size.

    python -m benchmarks.carry wheels
    python -m benchmarks.carry wheels --python 3.12 --mib 64 bitsandbytes

On that machine: `python -m pip install --no-index --no-deps --target site wheels/*.whl`, with `site` on PYTHONPATH.
Versions are those in constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Packages that this package and its tests need, except PyTorch, Lightning and their dependencies.
PACKAGES = ("transformers", "platformdirs", "jsonargparse", "docstring_parser", "typeshed_client", "xxhash")
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)


def main(arguments: Sequence[str]) -> None:
    """Download wheels into a folder; exit with a message if their total size exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="default: all packages that a bare machine lacks")
    parser.add_argument("--python", default="3.12", help="Python version of that machine")
    parser.add_argument("--mib", type=int, default=64, help="limit on the total size, MiB")
    args = parser.parse_args(arguments)
    versions = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in args.packages]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python-version", args.python, "--implementation", "cp", "--dest", str(args.folder)),
            *(part for platform in platforms for part in ("--platform", platform)),
            *wanted,
        ],
        check=True,
    )
    wheels = sorted(args.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:7.1f} MiB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{total:7.1f} MiB  together")
    if total > args.mib:
        sys.exit(f"{total:.1f} MiB are more than the {args.mib} MiB that can be carried: carry them in parts.")


def pinned(constraints: str) -> dict[str, str]:
    """Return the version of each package that a constraints file pins."""
    pairs = (line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    return {name: version.strip() for name, version in pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
