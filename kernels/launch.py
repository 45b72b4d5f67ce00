"""Where kernels of Triton are there, and launch options that all of them with matrix products share.

Every launch also says `enable_fp_fusion=False` itself: whether the compiler fuses a product and a sum would decide
about bits, differently in two kernels that must agree, and Triton's default for it is about to change. Where a fused
multiply-add is wanted, the kernels write `tl.fma`.
"""

import importlib.util
import os

import torch

_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton asks for it once, when it decorates kernels: on any device they are interpreted, slowly, to be tried there.
IS_INTERPRETED = _IS_INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
# It comes with a torch that is built for GPUs; any other does not need it.
HAS_TRITON = IS_INTERPRETED or (_IS_INSTALLED and torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


def takes_triton(tensor: torch.Tensor) -> bool:
    """Whether what is computed from a tensor is computed by Triton's kernels, not by plain torch."""
    return tensor.is_cuda or IS_INTERPRETED


def dot_options(num_stages: int) -> dict[str, int]:
    """Depth of the software pipeline, and on AMD's GPUs one matrix instruction for tiles of every height.

    Instructions of other heights sum over other depths at a time, which would give rows other bits in other tiles.
    AMD's pipeline is two stages deep: its 64 KiB of shared memory hold no more.
    """
    if torch.version.hip is None:
        return {"num_stages": num_stages}
    return {"num_stages": 2, "matrix_instr_nonkdim": 16}


def has_warpgroups(device: torch.device) -> bool:
    """Whether a GPU has the matrix instructions of Hopper or later data-centre GPUs, which keep operands in memory."""
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    )
