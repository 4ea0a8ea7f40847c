"""The command line as `python -m lightning_protrain`."""

from __future__ import annotations

from lightning_protrain_command import main

if __name__ == "__main__":
    main()
