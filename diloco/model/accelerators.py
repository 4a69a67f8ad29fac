"""The specified peak speeds of accelerators, and which share of them training reaches as a rule.

The share is a default for planning, not a promise: `diloco bench speed --json` on the machine itself is better.
"""

from dataclasses import dataclass

from diloco.errors import ConfigError

GIB = 2.0**30
CPU = "cpu"


@dataclass(frozen=True)
class Accelerator:
    """Describe an accelerator: its peaks, its memory, and the share of a peak that training reaches."""

    called: str  # part of what the driver calls it
    bf16_flops: float  # dense peak, a second
    fp32_flops: float
    memory_bytes: float
    mfu: float = 0.40  # of the peak; 46 % were measured on an H200 (150m, compiled)

    def flops(self, dtype: str) -> float:
        """Return the FLOPs per second that training gets with this compute type."""
        return self.mfu * (self.bf16_flops if dtype == "bf16" else self.fp32_flops)


# By the name to ask for. Where one driver's name contains another's, the first of them here counts.
ACCELERATORS = {
    "h200": Accelerator("H200", 989e12, 67e12, 141e9),
    "h100-pcie": Accelerator("H100 PCIe", 756e12, 51e12, 80e9),
    "h100": Accelerator("H100", 989e12, 67e12, 80e9),
    "b200": Accelerator("B200", 2250e12, 75e12, 180e9),
    "a100": Accelerator("A100", 312e12, 19.5e12, 80e9),
    "l40s": Accelerator("L40S", 362e12, 91e12, 48e9),
    "l40": Accelerator("L40", 181e12, 90e12, 48e9),
    "l4": Accelerator("L4", 121e12, 30e12, 24e9, mfu=0.35),
    "a10g": Accelerator("A10G", 70e12, 31e12, 24e9, mfu=0.35),
    "5090": Accelerator("RTX 5090", 210e12, 105e12, 32e9, mfu=0.35),
    "4090": Accelerator("RTX 4090", 165e12, 83e12, 24e9, mfu=0.35),
    "3090": Accelerator("RTX 3090", 71e12, 36e12, 24e9, mfu=0.35),
    CPU: Accelerator("cpu", 60e9, 60e9, 16 * GIB, mfu=1.0),  # what two cores reached: others differ by far
}


def accelerator_named(name: str) -> Accelerator:
    """Look up an accelerator by its key in `ACCELERATORS`, in any case. Raise ConfigError if it is unknown."""
    if name.lower() not in ACCELERATORS:
        raise ConfigError(
            f"--accelerator {name}: there are {', '.join(ACCELERATORS)}; for any other measure it: "
            "diloco bench speed --json > speed.json, then --profile speed.json"
        )
    return ACCELERATORS[name.lower()]


def called(driver_name: str) -> Accelerator | None:
    """Find the accelerator that a driver's name means; None if it is not in the table."""
    return next((one for one in ACCELERATORS.values() if one.called in driver_name), None)
