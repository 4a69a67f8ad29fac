"""Read the numbers that a plan is made from: those of the model from its skeleton, bytes from the codecs."""

from functools import cache

from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.spans import spans_by_bandwidth
from diloco.config.schema import Config, DataConfig
from diloco.data.source import source_kind
from diloco.errors import DataError
from diloco.island.layout import Layout, fragments_of
from diloco.island.parallel import blocks_of
from diloco.model.build import Network, build_network
from diloco.model.flops import flops_per_token
from diloco.plan.predict import Workload


def workload_of(config: Config) -> Workload:
    """Build the model's skeleton, without data or pretrained weights, and measure it."""
    vocab = 1 if config.model.hf else config.model.vocab or data_vocab(config.data)
    sequence = config.data.sequence
    model = config.model.model_copy(update={"weights": "fresh"})  # its config is enough
    positions = sequence if config.model.hf else 1  # no parameter depends on them, but tables that may take gigabytes
    network = build_network(model, data_vocab=vocab, sequence=positions, seed=config.seed)
    module = network.module
    layout = Layout.of_module(module)

    @cache
    def fragments(count: int, pattern: str) -> tuple[int, ...]:
        return fragments_of(layout, count, pattern, network.anatomy.blocks).counts

    return Workload(
        name=network.name, parameters=sum(p.numel() for p in module.parameters()), trained=layout.size,
        **_sizes(network),
        flops_per_token=flops_per_token(network, sequence), tokens_per_step=config.island.batch * sequence,
        fragments=fragments, bytes_of=bytes_of,
    )  # fmt: skip


def data_vocab(data: DataConfig) -> int:
    """Return the data's vocabulary size without reading the data itself, which may be large or elsewhere."""
    try:
        return source_kind(data).vocab(data)
    except DataError as error:
        raise DataError(
            f"{error}; to plan without it, say how large a vocabulary it has: --set model.vocab=32768"
        ) from None


@cache
def bytes_of(codec_name: str, count: int, islands: int) -> tuple[int, int]:
    """Return the bytes that an island sends and receives in a round: of all islands, the largest figures.

    Contributions go to the owners of the other spans, the mean of the own span goes to everybody. `count` is the number
    of values.
    """
    codec, result = codec_named(codec_name), codec_named(result_codec_for(codec_name, islands))
    lengths = [span.hi - span.lo for span in spans_by_bandwidth(count, [1.0] * islands)]
    given, meant = [codec.size(length) for length in lengths], [result.size(length) for length in lengths]
    others = islands - 1
    sent = max(sum(given) - own + others * mean for own, mean in zip(given, meant, strict=True))
    received = max(others * own + sum(meant) - mean for own, mean in zip(given, meant, strict=True))
    return sent, received


def _sizes(network: Network) -> dict[str, int]:
    """Estimate the model's sizes by the usual proportions.

    A block's attention has four matrices of width x width, the rest is SwiGLU's three.
    """
    blocks = blocks_of(network.module, network.anatomy)
    matrices = [p for p in network.module.parameters() if p.ndim >= 2]
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in matrices if id(p) not in inside]
    vocab, width = max((tuple(p.shape[:2]) for p in outside), default=(0, 0))
    block = sum(p.numel() for p in blocks[0].parameters() if p.ndim >= 2)
    feed_forward = max(0, block - 4 * width * width) // max(1, 3 * width)
    return {"blocks": len(blocks), "width": width, "feed_forward": feed_forward, "vocab": vocab}
