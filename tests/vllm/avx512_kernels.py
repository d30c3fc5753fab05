"""vLLM plugin that runs the kernels for block-wise FP8 and MXFP4 on CPUs with AVX512-BF16 but without AMX.

vLLM's CPU build offers these kernels only with AMX, but they also run with AVX512-BF16 alone. vLLM loads plugins in
every process, including its ranks.
"""

from pathlib import Path

NAME = "slipstream_avx512_kernels"


def write_plugin(folder: Path) -> Path:
    """Writes a package's metadata that registers this plugin; vLLM finds it once the folder is on Python's path."""
    package = folder / f"{NAME}-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:offer_kernels\n")
    return folder


def offer_kernels() -> None:
    """Makes vLLM select the kernels without AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    CPUExpertsMxfp4._supports_current_device = staticmethod(lambda: True)
