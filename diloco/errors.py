"""Every error a person can meet, in one tree. Each says what happened, whether it took effect, and what to do."""


class DilocoError(Exception):
    """The root. `code` is stable: scripts and documentation may refer to it."""

    code = "diloco"


class ConfigError(DilocoError):
    """The configuration cannot work. Nothing was started."""

    code = "config"


class DataError(DilocoError):
    """A data source is missing, damaged or does not fit the model."""

    code = "data"


class ModelError(DilocoError):
    """The model cannot be built, loaded or sharded as asked."""

    code = "model"


class DeviceError(DilocoError):
    """This machine cannot run what was asked (devices, processes, memory)."""

    code = "device"


class LeaderFailed(DilocoError):
    """Another process of this island failed and has said why."""

    code = "leader"


class MissingExtra(DilocoError):
    """An optional package is needed and not installed."""

    code = "extra"

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs {package}: pip install 'diloco[{extra}]'")


class SaveError(DilocoError):
    """A save cannot be read or does not fit this run. The save was not changed."""

    code = "save"


class TrainingDiverged(DilocoError):
    """Training produced nothing but non-finite gradients. The last save is still good."""

    code = "diverged"
