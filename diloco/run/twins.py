"""Two islands with one key: each hides the other from everybody else. Whoever came later is told so, and ends."""

from diloco.comm.peers.record import PeerRecord

TWIN = "another island has this one's key, and takes part as {name} from {where}"
END = "stop it, or give this one a folder of its own (--dir), in which it gets a key of its own"


class Twins:
    """Find records under this island's own key that another process has signed: its certificate is another one."""

    def __init__(self, certificate: bytes, began_ms: int) -> None:
        self._certificate, self._began_ms = certificate, began_ms
        self._earlier: set[bytes] = set()  # certificates of those who were there before: a last life, or a twin

    def look(self, own: PeerRecord | None) -> tuple[str, bool]:
        """Return what to tell of a twin, and whether it was here before this process; an empty text: there is none.

        A record from before this process began may be that of its own last life, which signs no more.
        """
        if own is None or own.certificate == self._certificate:
            return "", False
        if own.sequence <= self._began_ms:
            self._earlier.add(own.certificate)
            return "", False
        where = ", ".join(f"{host}:{port}" for host, port in own.bulk) or "behind a relay"
        return TWIN.format(name=own.name, where=where), own.certificate in self._earlier
