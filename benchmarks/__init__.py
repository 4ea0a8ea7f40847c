"""Benchmarks: each is a program, `python -m benchmarks.NAME --help`."""

import lightning_protrain  # noqa: F401  before Lightning, which would import a torchvision that does not load
