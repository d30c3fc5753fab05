"""Compiles the kernels of paged attention for several GPUs, and checks that they fit in shared memory. Needs no GPU.

    PYTHONPATH=.triton python -m tests.unit.actors.attention.compile_kernels

The interpreter accepts programs that the compiler refuses. TRITON_INTERPRET must not be set.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.attention.paged_kernel import STEP_POINTERS, Blocks, add_kernel, attend_kernel

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # limit per block, by compute capability
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPES = (  # dtype, head dim, heads per key head, has a window, has a soft cap
    (torch.bfloat16, 128, 4, False, False),
    (torch.float16, 80, 7, True, True),
    (torch.bfloat16, 256, 2, False, False),
    (torch.float32, 256, 1, True, False),
)


def compiled(kernel: Any, constants: dict[str, Any], dtype: torch.dtype, capability: int, warps: int) -> Any:
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("query", "pool", "output"), f"*{TYPES[dtype]}")
    types |= dict.fromkeys(("partial", "maxima", "totals"), "*fp32")
    types |= dict.fromkeys(STEP_POINTERS, "*i64")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): constant for name, constant in constants.items()},
    )
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    for capability, limit in SHARED_BYTES.items():
        for dtype, head_dim, group, has_window, has_softcap in SHAPES:
            blocks = Blocks.of(head_dim, group, dtype)
            shared = {
                "KV_HEADS": 2, "GROUP": group, "HEAD_DIM": head_dim, "HAS_WINDOW": has_window, "SPLIT": 512,
                "BLOCK_D": blocks.dims,
            }  # fmt: skip
            own = {
                "PAGE_SIZE": 16, "HAS_SOFTCAP": has_softcap, "BLOCK_T": blocks.tokens, "BLOCK_Q": blocks.queries,
                "BLOCK_N": blocks.keys,
            }  # fmt: skip
            for in_one_pass in (False, True):
                constants = {**shared, **own, "IN_ONE_PASS": in_one_pass}
                used = compiled(attend_kernel, constants, dtype, capability, blocks.warps).metadata.shared
                assert used <= limit, f"{used} bytes of {limit} at {capability} for {dtype}, head dim {head_dim}"
            compiled(add_kernel, {**shared, "BLOCK_G": triton.next_power_of_2(group)}, dtype, capability, 1)
        print(f"compute capability {capability / 10}: {len(SHAPES)} shapes compiled")


if __name__ == "__main__":
    main()
