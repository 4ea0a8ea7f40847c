"""The command line: `lightning-protrain fit --config configs/quickstart.yaml`."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# The callbacks are imported so that a config can call them by their short names.
from lightning_protrain.callbacks import baseline, completion, plan_monitor  # noqa: F401
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.module import CausalLMModule


class ProTrainCLI(LightningCLI):
    """LightningCLI with the defaults of this package; any other LightningModule and LightningDataModule can be given.

    The module brings its own optimizer, as one from a config would be made before `configure_model` makes parameters.

    Args:
        args: What to parse instead of the command line.
        run: Whether to run a subcommand; otherwise model, data and trainer are only made.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            trainer_defaults={"strategy": "protrain"},
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Sets the classes that a config need not name."""
        for key, default in (("model", CausalLMModule), ("data", ChatDataModule)):
            parser.set_defaults({key: {"class_path": f"{default.__module__}.{default.__qualname__}"}})


def main() -> None:
    """Entry point of the console script `lightning-protrain`."""
    ProTrainCLI()


if __name__ == "__main__":
    main()
