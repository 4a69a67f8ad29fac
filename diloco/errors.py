"""Every error a person can meet, in one tree. Each says what happened, whether it took effect, and what to do."""

from collections.abc import Mapping


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


class RemoteError(SaveError):
    """A remote store cannot be used. What lies there, and what lies here, was not changed."""

    code = "remote"


class SnapshotDamaged(SaveError):
    """A snapshot of the outer state is not what was written. An older one, with the log since, or a peer has it all."""

    code = "snapshot"


class TrainingDiverged(DilocoError):
    """Training produced nothing but non-finite gradients. The last save is still good."""

    code = "diverged"


class LoopError(DilocoError):
    """A training loop of one's own uses its run in a way that cannot work."""

    code = "loop"


class CodecError(DilocoError):
    """A vector cannot be encoded, or bytes cannot be decoded. Nothing was sent or applied."""

    code = "codec"


class PlanRefused(DilocoError):
    """A plan for an all-reduce cannot be right. Nothing was sent."""

    code = "reduce-plan"


class ReduceFailed(DilocoError):
    """An all-reduce did not come about. Nothing was applied, the contribution is kept: safe to try again.

    `peer` is who is to blame, where that is known; `hung_up` whose connection broke or never came about: it may have
    had its reason in a third one.
    """

    code = "reduce"

    def __init__(self, message: str, peer: str = "", hung_up: str = "") -> None:
        super().__init__(message)
        self.peer, self.hung_up = peer, hung_up


class ReduceCancelled(ReduceFailed):
    """This side gave an all-reduce up."""

    code = "reduce-cancelled"


class ContributionRefused(ReduceFailed):
    """A member's contribution holds NaN or infinity: try again without that member."""

    code = "contribution"

    def __init__(self, peer: str, reason: object) -> None:
        super().__init__(f"the contribution of {peer} is refused: {reason}", peer)


class TransportError(DilocoError):
    """Bytes could not be moved. The stream or connection named in the message is of no more use."""

    code = "transport"


class FrameError(TransportError):
    """A peer sent bytes that are no frame of ours. The stream was closed; nothing of the frame was used."""

    code = "frame"


class PeerLost(TransportError):
    """The connection to a peer broke, or never came about. What was sent last may or may not have arrived."""

    code = "peer-lost"


class WrongPeer(PeerLost):
    """Somebody else answers at a peer's address, so the peer itself is not reached there. Nothing was exchanged."""

    code = "wrong-peer"


class PeerRefused(TransportError):
    """A peer does not let us in. Nothing was exchanged."""

    code = "peer-refused"


class StreamEnded(TransportError):
    """The peer has sent its end mark: everything it had to say has arrived."""

    code = "stream-ended"


class StreamClosed(TransportError):
    """This side closed the stream or the transport. No fault of the peer."""

    code = "stream-closed"


class TransportTimeout(TransportError):
    """Nothing arrived in the time given. Nothing was consumed: it is safe to try again."""

    code = "transport-timeout"


class IdentityError(DilocoError):
    """A peer's key file cannot be used. The file was not changed."""

    code = "identity"


class TicketError(DilocoError):
    """A ticket does not let this peer in. Nothing was started."""

    code = "ticket"


class DirectoryError(DilocoError):
    """The directory of peers cannot be reached, or will not take or give a record."""

    code = "directory"


class RecordRefused(DirectoryError):
    """A peer record is not to be believed. `reason` is short and stable: refusals are counted by it."""

    code = "record"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"peer record refused, {reason}: {detail}")
        self.reason = reason


class RecordInvalid(DilocoError):
    """A record of the outer log cannot follow the one before it. It was not applied."""

    code = "log-record"


class MessageRefused(DilocoError):
    """A peer sent a message that is none of ours, or that cannot be right. It was not acted upon."""

    code = "message"


class TransferFailed(DilocoError):
    """An item could not be fetched. Chunks that arrived are checked and stay where they were put: safe to go on later.

    `failures` says of each peer that was asked why it is of no use.
    """

    code = "transfer"

    def __init__(self, message: str, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class ItemMissing(TransferFailed):
    """A peer does not have an item, or another one of that name. Ask somebody else."""

    code = "item-missing"


class DonorBusy(TransferFailed):
    """A peer serves as many as it can. Ask again later, or somebody else."""

    code = "donor-busy"


class WrongBytes(TransferFailed):
    """A peer sent bytes that are not those of the item. They were not used: that peer is broken, or lies."""

    code = "wrong-bytes"


class ManifestRefused(TransferFailed):
    """The description of an item cannot be right. Nothing was allocated or fetched."""

    code = "parcel"


class JoinRefused(DilocoError):
    """This machine cannot take part in the run as it is. Nothing was changed."""

    code = "join"


def first_line(error: BaseException) -> str:
    """What another library's error says, in a line; the name of its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
