"""Every error a person can meet, in one tree. Each says what happened, whether it took effect, and what to do."""

from collections.abc import Mapping


class DilocoError(Exception):
    """Signal an error that a person can meet. `code` is stable: scripts and documentation may refer to it."""

    code = "diloco"


class ConfigError(DilocoError):
    """Signal that the configuration cannot work. Nothing was started."""

    code = "config"


class DataError(DilocoError):
    """Signal that a data source is missing, damaged or does not fit the model."""

    code = "data"


class ModelError(DilocoError):
    """Signal that the model cannot be built, loaded or sharded as asked."""

    code = "model"


class DeviceError(DilocoError):
    """Signal that this machine cannot run what was asked (devices, processes, memory)."""

    code = "device"


class LeaderFailed(DilocoError):
    """Signal that another process of this island failed and has said why."""

    code = "leader"


class MissingExtra(DilocoError):
    """Signal that an optional package is needed and not installed."""

    code = "extra"

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs {package}: pip install 'diloco[{extra}]'")


class SaveError(DilocoError):
    """Signal that a save cannot be read or does not fit this run. The save was not changed."""

    code = "save"


class RemoteError(SaveError):
    """Signal that a remote store cannot be used. Nothing was changed, neither there nor here."""

    code = "remote"


class SnapshotDamaged(SaveError):
    """Signal that a snapshot of the outer state is not what was written.

    An older one with the log since then, or a peer, has all of it.
    """

    code = "snapshot"


class TrainingDiverged(DilocoError):
    """Signal that training produced nothing but non-finite gradients. The last save is still good."""

    code = "diverged"


class LoopError(DilocoError):
    """Signal that a user's own training loop uses its run in a way that cannot work."""

    code = "loop"


class CodecError(DilocoError):
    """Signal that a vector cannot be encoded, or bytes cannot be decoded. Nothing was sent or applied."""

    code = "codec"


class PlanRefused(DilocoError):
    """Signal that a plan for an all-reduce cannot be right. Nothing was sent."""

    code = "reduce-plan"


class ReduceFailed(DilocoError):
    """Signal that an all-reduce failed. Nothing was applied, the contribution is kept: it is safe to try again.

    `peer` is the one to blame, where that is known; `hung_up` is the one whose connection broke or was never made, for
    which a third peer may have been the reason. `local`: only members near this one lack the result, the mean is made.
    """

    code = "reduce"
    local = False

    def __init__(self, message: str, peer: str = "", hung_up: str = "") -> None:
        super().__init__(message)
        self.peer, self.hung_up = peer, hung_up


class ReduceCancelled(ReduceFailed):
    """Signal that this side has given up an all-reduce."""

    code = "reduce-cancelled"


class ContributionRefused(ReduceFailed):
    """Signal that a member's contribution is not finite, or larger than its offer says: try without that member."""

    code = "contribution"

    def __init__(self, peer: str, reason: object) -> None:
        super().__init__(f"the contribution of {peer} is refused: {reason}", peer)


class TransportError(DilocoError):
    """Signal that bytes could not be moved. The stream or connection that the message names is of no more use."""

    code = "transport"


class FrameError(TransportError):
    """Signal that a peer sent bytes that are no frame of ours. The stream was closed, the frame was not used."""

    code = "frame"


class PeerLost(TransportError):
    """Signal that the connection to a peer broke, or was never made.

    What was sent last may or may not have arrived.
    """

    code = "peer-lost"


class WrongPeer(PeerLost):
    """Signal that another peer answers at a peer's address, so the peer itself is not reached there.

    Nothing was exchanged.
    """

    code = "wrong-peer"


class PeerRefused(TransportError):
    """Signal that a peer does not admit this one, or not to this channel. Nothing was exchanged."""

    code = "peer-refused"


class StreamEnded(TransportError):
    """Signal that the peer has sent its end mark: everything it had to send has arrived."""

    code = "stream-ended"


class StreamClosed(TransportError):
    """Signal that this side closed the stream or the transport. It is no fault of the peer."""

    code = "stream-closed"


class TransportTimeout(TransportError):
    """Signal that nothing arrived in the time given. Nothing was consumed: it is safe to try again."""

    code = "transport-timeout"


class IdentityError(DilocoError):
    """Signal that a peer's key file cannot be used. The file was not changed."""

    code = "identity"


class TicketError(DilocoError):
    """Signal that a ticket does not admit this peer to a run. Nothing was started."""

    code = "ticket"


class DirectoryError(DilocoError):
    """Signal that the directory of peers cannot be reached, or does not take or give a record."""

    code = "directory"


class RecordRefused(DirectoryError):
    """Signal that a peer record is not to be believed. `reason` is short and stable: refusals are counted by it."""

    code = "record"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"peer record refused, {reason}: {detail}")
        self.reason = reason


class RecordInvalid(DilocoError):
    """Signal that a record of the outer log cannot follow the one before it. It was not applied."""

    code = "log-record"


class MessageRefused(DilocoError):
    """Signal that a peer sent a message that is none of ours, or cannot be right. It was not acted upon."""

    code = "message"


class TransferFailed(DilocoError):
    """Signal that an item could not be fetched. It is safe to continue later.

    Chunks that arrived are checked and stay where they were put. `failures` says of each peer that was asked why it is
    of no use.
    """

    code = "transfer"

    def __init__(self, message: str, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class ItemMissing(TransferFailed):
    """Signal that a peer does not have an item, or has another one of that name. Ask another peer."""

    code = "item-missing"


class DonorBusy(TransferFailed):
    """Signal that a peer serves as many others as it can. Ask it again later, or ask another peer."""

    code = "donor-busy"


class WrongBytes(TransferFailed):
    """Signal that a peer sent bytes that are not those of the item: it is broken, or lies.

    The bytes were not used.
    """

    code = "wrong-bytes"


class ManifestRefused(TransferFailed):
    """Signal that the description of an item cannot be right. Nothing was allocated or fetched."""

    code = "manifest"


class Evicted(DilocoError):
    """Signal that the run's owner has taken this island out of the run (`diloco evict`). The run goes on without it."""

    code = "evicted"


class JoinRefused(DilocoError):
    """Signal that this machine cannot take part in the run as it is. Nothing was changed."""

    code = "join"


class LaunchError(DilocoError):
    """Signal that islands could not be started, listed or ended where they run. What was started before goes on."""

    code = "launch"


def first_line(error: BaseException) -> str:
    """Return what another library's error says, in one line, or the name of its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
