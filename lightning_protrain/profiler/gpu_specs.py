"""The performance of GPUs according to their data sheets, for planning without the GPU. Does not import torch.

Figures are the maker's, for dense matrices: advertised rates with sparsity are halved. Half-precision rates are for
accumulation in float32, as PyTorch uses; on GeForce cards this is half of the advertised rate. `float32` is the rate
without TF32, which PyTorch does not use by default. Programs do not reach these peaks, so all figures are multiplied by
the efficiencies below, unless the GPU has been measured (calibration.json).
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_protrain.profiler.records import HardwareProfile

GB, TERA, GIB = 1e9, 1e12, 1 << 30

# Fraction of the peak that matrix products reach. The best shapes reach 0.87 on an A100 SXM, 0.81 on an A100 PCIe, 0.80
# on an H100, 0.78 on a B200, and 0.51 to 0.60 on an MI300X; typical shapes of models reach less.
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table
MATMUL_EFFICIENCY = {"nvidia": 0.75, "amd": 0.50}
# The same where tensor cores accumulate float32 at half their rate (GeForce, A10G), so that neither operands nor power
# limit them, and the clock is above the nominal one. Products in bfloat16 reach 0.97 on an RTX 4060 Ti, 0.97 to 1.05
# (median 1.00 of eight cards) on an RTX 4090, 1.01 on an RTX 4070 Ti SUPER, 1.08 on an RTX 3090 and 1.14 on an RTX
# 5090; this is the lowest. Products in float32 reach 0.52 to 0.69, without tensor cores.
# https://github.com/zzc0721/torch-performence-test-data/blob/main/database.md
HALF_RATE_EFFICIENCY, GEFORCE_FLOAT32 = 0.97, 0.65
# Fraction of the memory bandwidth that elementwise operations and optimizer steps reach; our estimate.
MEMORY_EFFICIENCY = 0.85
# Bytes per second, lane and direction of a PCI Express link after its line code (128b/130b).
# https://pcisig.com/specifications
LANE_BYTES = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}
# Fraction of the link's rate that copies reach. nvbandwidth reaches 24.8 of 31.5 GB/s on an A100 SXM
# (https://forums.developer.nvidia.com/t/352186) and 55.6 of 63 GB/s on a link of generation 5
# (https://developer.nvidia.com/blog/?p=115566); this is the lower fraction.
LINK_EFFICIENCY = 0.79
# Fraction of a copy's rate while copies run in the other direction. Our estimate, which varies between machines.
BESIDE_EFFICIENCY = 0.80
# Memory bandwidth of the host, bytes per second: per core, and at most. Our estimates, for hosts from 2
# memory channels with 8 to 16 cores to 8 channels with 64 cores.
HOST_BYTES_PER_CORE, HOST_BYTES_MOST = 4e9, 200e9
# Fraction of the rate of the host's optimizer step while copies of the device share the host's memory. Beside an H100 a
# step took 1.138 s in training and 0.838 s alone (benchmarks/results/2026-11-27-gpu).
HOST_BESIDE_EFFICIENCY = 0.74
# Seconds of the host to launch one operation of the device: Python, autograd, dispatch and driver take 5 to 25 us.
# https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html
LAUNCH = 5e-6
# What has been measured on GPUs; `python -m benchmarks.gpu publish` writes it. "gpus": rates by name in the catalogue,
# in place of those of the data sheet. "alpha": fragmentation factors by dtype of the weights.
CALIBRATION: dict[str, Any] = json.loads(Path(__file__).with_name("calibration.json").read_text(encoding="utf-8"))
# Bytes that AdamW moves for each float32 element: it reads four numbers and writes three.
STEP_BYTES = 28
# Usable fraction of the memory (the driver reserves some), usable fraction with error correction on GDDR6, and bytes of
# the CUDA context with libraries.
VISIBLE, ECC_VISIBLE, CONTEXT_BYTES = 0.99, 15 / 16, 3 * GIB // 4


@dataclass(frozen=True)
class GPU:
    """One GPU of the catalogue; the module's docstring defines the figures.

    Attributes:
        name: Usual name, including the variant.
        gib: Memory, GiB.
        memory: Memory bandwidth, 1e9 bytes per second.
        float32: TFLOP/s of float32.
        half: TFLOP/s of float16 and bfloat16 on tensor cores, accumulated in float32, dense.
        pcie: Generation of the PCI Express link.
        source: URL of the maker's figures.
        lanes: Number of lanes of the PCI Express link.
        bfloat16: True if the tensor cores support bfloat16.
        inline_ecc: True if error correction is on by default and takes memory.
        vendor: Key of MATMUL_EFFICIENCY.
        aliases: Other names, such as PyTorch's.
    """

    name: str
    gib: int
    memory: float
    float32: float
    half: float
    pcie: int
    source: str
    lanes: int = 16
    bfloat16: bool = True
    inline_ecc: bool = False
    vendor: str = "nvidia"
    aliases: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Memory that a process can use, bytes."""
        return int(self.gib * GIB * VISIBLE * (ECC_VISIBLE if self.inline_ecc else 1)) - CONTEXT_BYTES

    @property
    def half_rate(self) -> bool:
        """True if tensor cores accumulate float32 at half their rate: twice that of float32, not four times."""
        return self.vendor == "nvidia" and self.half < 3 * self.float32

    @property
    def link(self) -> float:
        """Achievable rate of the PCI Express link in each direction, bytes per second."""
        return LANE_BYTES[self.pcie] * self.lanes * LINK_EFFICIENCY

    def flops(self) -> dict[str, float]:
        """Return the achievable FLOP/s of matrix products, by dtype."""
        share = MATMUL_EFFICIENCY[self.vendor]
        full, half = (GEFORCE_FLOAT32, HALF_RATE_EFFICIENCY) if self.half_rate else (share, share)
        rates = {"float32": self.float32 * TERA * full, "float16": self.half * TERA * half}
        return rates | ({"bfloat16": rates["float16"]} if self.bfloat16 else {})


_NVIDIA = "https://www.nvidia.com/en-us"
_GEFORCE = f"{_NVIDIA}/geforce/graphics-cards"  # Rates are computed from clocks and numbers of cores.
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_RTX50 = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"

CATALOGUE: tuple[GPU, ...] = (
    GPU("RTX 3060", 12, 360, 12.7, 25.5, 4, f"{_GEFORCE}/30-series/rtx-3060-3060ti/"),
    GPU("RTX 3080", 10, 760, 29.8, 59.5, 4, _GA102),
    GPU("RTX 3090", 24, 936, 35.6, 71, 4, _GA102),
    GPU("RTX 3090 Ti", 24, 1008, 40, 80, 4, _ADA),
    GPU("RTX 4060 Ti 16GB", 16, 288, 22.1, 44.1, 4, f"{_GEFORCE}/40-series/rtx-4060-4060ti/", lanes=8),
    GPU("RTX 4070 Ti SUPER", 16, 672, 44.1, 88.2, 4, f"{_GEFORCE}/40-series/rtx-4070-family/"),
    GPU("RTX 4080", 16, 717, 48.7, 97.5, 4, _ADA),
    GPU("RTX 4090", 24, 1008, 82.6, 165.2, 4, _ADA),
    GPU("RTX 5060 Ti 16GB", 16, 448, 23.7, 47.4, 5, f"{_GEFORCE}/50-series/rtx-5060-family/", lanes=8),
    GPU("RTX 5090", 32, 1792, 104.8, 209.5, 5, _RTX50),
    GPU("RTX A5000", 24, 768, 27.8, 111.1, 4, f"{_NVIDIA}/design-visualization/rtx-a5000/"),
    GPU("RTX A6000", 48, 768, 38.7, 154.8, 4, _GA102),
    GPU("RTX 6000 Ada", 48, 960, 91.1, 364.2, 4, f"{_NVIDIA}/design-visualization/rtx-6000/"),
    GPU("T4", 16, 300, 8.1, 65, 3, f"{_NVIDIA}/data-center/tesla-t4/", bfloat16=False, inline_ecc=True),
    GPU("A10", 24, 600, 31.2, 125, 4, f"{_NVIDIA}/data-center/products/a10-gpu/", inline_ecc=True),
    GPU("A10G", 24, 600, 35, 70, 4, _A10G, inline_ecc=True),
    GPU("L4", 24, 300, 30.3, 121, 4, f"{_NVIDIA}/data-center/l4/", inline_ecc=True),
    GPU("L40S", 48, 864, 91.6, 362, 4, f"{_NVIDIA}/data-center/l40s/", inline_ecc=True),
    GPU("V100 SXM 16GB", 16, 900, 15.7, 125, 3, f"{_NVIDIA}/data-center/v100/", bfloat16=False,
        aliases=("Tesla V100-SXM2-16GB", "V100 16GB")),
    GPU("V100 SXM 32GB", 32, 900, 15.7, 125, 3, f"{_NVIDIA}/data-center/v100/", bfloat16=False,
        aliases=("Tesla V100-SXM2-32GB", "V100 32GB")),
    GPU("A100 40GB", 40, 1555, 19.5, 312, 4, f"{_NVIDIA}/data-center/a100/",
        aliases=("A100-SXM4-40GB", "A100-PCIE-40GB", "A100 40GB PCIe", "A100 SXM 40GB", "A100 PCIe 40GB")),
    GPU("A100 80GB PCIe", 80, 1935, 19.5, 312, 4, f"{_NVIDIA}/data-center/a100/",
        aliases=("A100-PCIE-80GB",)),
    GPU("A100 80GB SXM", 80, 2039, 19.5, 312, 4, f"{_NVIDIA}/data-center/a100/",
        aliases=("A100-SXM4-80GB", "A100 SXM 80GB", "A100 80GB")),
    GPU("H100 PCIe", 80, 2000, 51, 756, 5, f"{_NVIDIA}/data-center/h100/", aliases=("H100 80GB PCIe",)),
    GPU("H100 SXM", 80, 3350, 67, 989, 5, f"{_NVIDIA}/data-center/h100/",
        aliases=("H100 80GB HBM3", "H100 SXM5", "H100 80GB SXM")),
    GPU("H200", 141, 4800, 67, 989, 5, f"{_NVIDIA}/data-center/h200/", aliases=("H200 SXM",)),
    GPU("B200", 180, 7700, 75, 2250, 5, f"{_NVIDIA}/data-center/hgx/", aliases=("B200 SXM", "HGX B200")),
    GPU("MI300X", 192, 5300, 163.4, 1307.4, 5, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        vendor="amd"),
)  # fmt: skip

# Compute capability of each NVIDIA GPU; the kernels that PyTorch chooses depend on it.
# https://developer.nvidia.com/cuda-gpus
CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("V100 SXM 16GB", "V100 SXM 32GB"),
    (7, 5): ("T4",),
    (8, 0): ("A100 40GB", "A100 80GB PCIe", "A100 80GB SXM"),
    (8, 6): ("RTX 3060", "RTX 3080", "RTX 3090", "RTX 3090 Ti", "RTX A5000", "RTX A6000", "A10", "A10G"),
    (8, 9): ("RTX 4060 Ti 16GB", "RTX 4070 Ti SUPER", "RTX 4080", "RTX 4090", "RTX 6000 Ada", "L4", "L40S"),
    (9, 0): ("H100 PCIe", "H100 SXM", "H200"),
    (10, 0): ("B200",),
    (12, 0): ("RTX 5060 Ti 16GB", "RTX 5090"),
}


def capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability of the GPU with exactly this name, or None if it is unknown."""
    return next((version for version, names in CAPABILITIES.items() if name in names), None)


# Words that are ignored in a GPU's name.
_NOISE = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "radeon", "gpu", "graphics", "generation", "oam"}


def gpu(name: str, host_bytes: int, cores: int) -> HardwareProfile:
    """Return the hardware profile of a machine with a GPU of the catalogue.

    Args:
        name: Name in any spelling: `"RTX 3090"`, `"rtx3090"`, `"NVIDIA GeForce RTX 3090"`.
        host_bytes: Host memory that one rank may use, bytes.
        cores: Number of host cores of one rank.

    Raises:
        ValueError: If the GPU is unknown, or `host_bytes` or `cores` is not a positive integer.
    """
    sheet = find(name)
    for what, value in (("host_bytes", host_bytes), ("cores", cores)):
        if type(value) is not int or value <= 0:
            raise ValueError(f"{what}={value!r}: give a positive integer.")
    memory = sheet.memory * GB * MEMORY_EFFICIENCY
    host_memory = min(cores * HOST_BYTES_PER_CORE, HOST_BYTES_MOST)
    measured = CALIBRATION["gpus"].get(sheet.name, {})
    profile = HardwareProfile(
        name=sheet.name,
        upload=sheet.link,
        download=sheet.link,
        upload_beside=sheet.link * BESIDE_EFFICIENCY,
        download_beside=sheet.link * BESIDE_EFFICIENCY,
        flops=sheet.flops(),
        memory=memory,
        device_step=memory / STEP_BYTES,
        host_step=host_memory / STEP_BYTES,
        host_memory=host_memory,
        device_bytes=sheet.device_bytes,
        host_bytes=host_bytes,
        launch=LAUNCH,
        host_beside=HOST_BESIDE_EFFICIENCY,
    )
    return replace(profile, **measured | {"flops": {**profile.flops, **measured.get("flops", {})}})


def find(name: str) -> GPU:
    """Return the GPU of the catalogue with this name, in any spelling.

    Raises:
        ValueError: If the name is unknown or ambiguous.
    """
    wanted = _plain(name)
    for line in CATALOGUE:
        if wanted in _names(line):
            return line
    known = ", ".join(line.name for line in CATALOGUE)
    plain = {other: line.name for line in CATALOGUE for other in sorted(_names(line), reverse=True)}
    near = [line.name for line in CATALOGUE if wanted and _plain(line.name).startswith(wanted)]
    near = near or [plain[other] for other in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.6)]
    meant = f" Did you mean {' or '.join(repr(other) for other in dict.fromkeys(near))}?" if near else ""
    raise ValueError(f"No GPU {name!r} is in the catalogue.{meant} Known GPUs: {known}.")


def _names(line: GPU) -> set[str]:
    names = {_plain(other) for other in (line.name, *line.aliases)}
    return names | {f"{other}{line.gib}gb" for other in names if not re.search(r"\d+gb", other)}


def _plain(name: str) -> str:
    """Return the name in lower case, without spaces, punctuation and ignored words."""
    # Split letters from digits, so that `rtx` is ignored in `rtx3090` too.
    words = re.findall(r"[a-z]+|\d+", name.lower())
    return "".join(word for word in words if word not in _NOISE)
