"""What things take in virtual time: modelled compute, links and all-reduces.

Ticks with nothing to do are left out: an island that does not lead ticks when a heartbeat is due; one that leads looks
at what has come every 20 ms, or as often as so many islands let it.
"""

from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.spans import CHUNKS
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.node import Node
from diloco.elastic.runtime.reducing import CONNECT_S, SLACK
from diloco.simulate.virtual.allreduce import Cost, flat, two_level
from diloco.simulate.virtual.costs import Costs
from diloco.simulate.virtual.network import ModelledLinks
from diloco.simulate.virtual.setting import Setting
from diloco.simulate.virtual.shared import SharedPeers
from diloco.simulate.virtual.timeline import Timeline
from diloco.simulate.virtual.world import KEEP_RECORDS, Life, World

TICK_S = 0.02
IDLE_S = 0.25  # between two ticks of one that leads and has heard nothing
LOOK_S = 1e-4  # what looking at its answers takes a coordinator, for each island
STATE_BYTES = 8  # a value: parameters and momentum


class Modelled(Costs):
    connect_s = CONNECT_S

    def __init__(self, setting: Setting) -> None:
        super().__init__(Timeline(setting.seed, smooth=False))
        self.setting, host = setting, setting.host
        self.unreachable_s = setting.silence_s
        encode_ns, decode_ns = host.codec_ns[setting.codec]
        self.encode_s = 1e-9 * setting.values * (host.cut_ns + encode_ns)
        self.apply_s = 1e-9 * setting.values * (decode_ns + host.apply_ns)
        self.result_bytes = codec_named(result_codec_for(setting.codec, 2)).size(setting.values)
        self._directory = dict.fromkeys(setting.names)

    def network(self, world: World) -> ModelledLinks:
        return ModelledLinks(self.setting, world)

    def peers(self, name: str, now: float) -> SharedPeers:
        return SharedPeers(self.setting.silence_s, name, self._directory, now)

    def first_tick_s(self, node: Node) -> float:
        return node.own.options.heartbeat_s * self.timeline.chance("first tick")

    def ticks(self, life: Life) -> bool:
        return life.node.own.term is None or life.heard or self.timeline.now - life.ticked_at >= IDLE_S

    def tick_s(self, node: Node, islands: int) -> float:
        return node.own.options.heartbeat_s if node.own.term is None else max(TICK_S, LOOK_S * islands)

    def phase_s(self, name: str) -> float:
        usual_s, chance = self.setting.phase_s * self.setting.pace(int(name)), self.timeline.chance(f"phase {name}")
        return usual_s * (1 + self.setting.jitter * (2 * chance - 1))

    def fetch_s(self) -> float:
        return self._transfer_s(self.result_bytes)

    def catch_up_s(self, missed: int) -> float:
        whole = missed > KEEP_RECORDS
        return self._transfer_s(STATE_BYTES * self.setting.values if whole else missed * self.result_bytes)

    def _transfer_s(self, size: int) -> float:
        line = self.setting.line
        return 8 * size / line.down_bits_per_s + 4 * line.delay_s

    def closed_s(self, gone: Node, other: Node) -> float | None:
        """Only those who speak to all have a stream to each other."""
        return self.setting.line.delay_s if other.liveness.broadcasts or gone.liveness.broadcasts else None

    def allreduce(self, members: int) -> Cost:
        cost = two_level if self.setting.reduces_in_two_levels(members) else flat
        return cost(members, self.setting.values, self.setting.codec)

    def allreduce_s(self, begin: Begin, now: float) -> float:
        """All wait for the slowest link."""
        setting = self.setting
        share = min(setting.rate(int(member), now) for member in begin.members) if setting.diurnal else 1.0
        digest_s = 1e-9 * setting.host.digest_ns * setting.values
        return self.allreduce(len(begin.members)).seconds(setting.line, share) + digest_s

    def reduce_s(self, begin: Begin) -> list[float]:
        return [self.allreduce_s(begin, self.timeline.now)] * len(begin.members)

    def stall_s(self, begin: Begin, *, silent: bool) -> float:
        """Where its connections do not close, its chunks are missed."""
        stalled_s = self.setting.silence_s + SLACK * self.allreduce_s(begin, self.timeline.now) / CHUNKS
        return stalled_s if silent else self.setting.line.delay_s

    def failure_s(self, *, first: bool) -> float:
        return self.setting.line.delay_s
