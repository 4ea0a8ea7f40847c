"""Compare ways to train a model on a GPU that need not be here: `inspect_plan.py Qwen/Qwen3-8B --gpu "RTX 4090"`.

No weights, no data and no network are needed.
"""

from __future__ import annotations

import argparse

import lightning_protrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="Qwen/Qwen3-1.7B", help="name, folder or config.json")
    parser.add_argument("--gpu", default="RTX 3060")
    parser.add_argument("--host-memory", default="32GiB")
    parser.add_argument("--host-cores", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--save", help="file for the last plan, which ProTrainStrategy(plan=...) takes")
    args = parser.parse_args()

    plan = None
    for method in ("full", "lora", "qlora"):
        host = {"host_memory": args.host_memory, "host_cores": args.host_cores}
        try:
            plan = lightning_protrain.plan(args.model, method=method, gpu=args.gpu, length=args.length, **host)
        except ValueError as error:
            print(f"{method}: {error}")
            continue
        prediction = plan.prediction
        print(
            f"{method}: {prediction.tokens_per_second:,.0f} tokens/s with {prediction.samples} rows, "
            f"{prediction.device_bytes / 2**30:.1f} GiB of the "
            f"device, {prediction.host_bytes / 2**30:.1f} GiB of the host, bound by {prediction.bound}"
        )
    if plan is not None:
        print(plan.explain())
        if args.save is not None:
            plan.save(args.save)


if __name__ == "__main__":
    main()
