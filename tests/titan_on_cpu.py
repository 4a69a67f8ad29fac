"""Run by test_own_mesh.py: an unmodified torchtitan, which takes CUDA for granted, told that its device is the CPU.

torchrun --nproc-per-node 2 tests/titan_on_cpu.py EXAMPLE OPTIONS…
"""

import runpy
import sys
from types import SimpleNamespace

import torch
import torch._utils

NOTHING = SimpleNamespace(total_memory=1)


class CpuDevice:
    """What torchtitan asks of a device's module, answered for a CPU, which has no memory of its own."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device) -> str:
        return "cpu"

    def get_device_properties(self, device) -> SimpleNamespace:
        return NOTHING

    def reset_peak_memory_stats(self) -> None:
        pass

    empty_cache = reset_peak_memory_stats

    def memory_stats(self, device) -> dict[str, int]:
        return {}


torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: CpuDevice()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
