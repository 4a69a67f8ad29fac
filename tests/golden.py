"""Golden digests of the codecs. `python tests/golden.py` makes them on every device of a machine, without pytest."""

from hashlib import sha256

import torch

from diloco.comm.codec.dct import Dct
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for

KEY = NoiseKey(round=3, fragment=0, role="a")
DIGESTS = {  # of what is encoded and decoded; of the weighted mean of four contributions, as an all-reduce must give it
    "fp32": ("cad21950294c0a90", "43bb26bbd05c61a8"),
    "bf16": ("98e33a13773f6d3f", "a6444733e263c31c"),
    "int8": ("b1e07e2e5f873c92", "477f4b9c624669f6"),
    "int4": ("7685260207de2164", "89337e20def1fbd9"),
    "fp4": ("414b8802337e0809", "d75e54a5a504d044"),
    "sparse": ("5895ed0ea5ee6fee", "8886d743f47efc05"),
    "sign": ("8e9737b4659af5fd", "ceca313766e54631"),
    "dct": ("4808532c85213ee0", "b394a1f05f7d07aa"),
    "lowrank": ("b38dea5356b28e61", "6014e95839a278d8"),
}
GOLDEN = {name: encoded for name, (encoded, _) in DIGESTS.items()}
REDUCED = {name: reduced for name, (_, reduced) in DIGESTS.items()}
MEMBERS = ("m00", "m01", "m02", "m03")
WEIGHTS = (1, 2, 3, 4)
SENDER_ONLY = ("dct", "lowrank")  # encoding may round as a machine likes; of given bytes all must decode the same
RESULT_KEY = NoiseKey(round=7, fragment=0, role="result")


def golden_contribution(count: int, member: int, device: str = "cpu") -> torch.Tensor:
    index = torch.arange(count, dtype=torch.int64, device=device)
    return ((index * (2654435761 + 2 * member)) % 65537 - 32768).float() / 4096 * ((index % 9) + 1 + member).float()


def given_bytes(name: str, count: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """What an honest sender might send, made by integer arithmetic."""
    codec, index = CODECS[name], torch.arange(CODECS[name].size(count), dtype=torch.int64, device=device)
    rows = ((index * (2654435761 + 2 * seed) >> 7) % 256).to(torch.uint8).view(-1, codec.unit_bytes)
    scales = rows[:, : 4 * codec.scales].view(torch.float32)
    scales.copy_((index[: scales.numel()].view(scales.shape) * 37 % 101 + 1).float() / 8192)
    if isinstance(codec, Dct):
        kept, step = codec.kept, codec.unit // codec.kept.keep
        places = torch.arange(kept.keep, device=device) * step + rows[:, -kept.keep :].long() * step // 256
        kept.write_places(places, rows)
    return rows.view(-1)


def encoded_contribution(name: str, count: int, number: int, device: str = "cpu") -> torch.Tensor:
    if name in SENDER_ONLY:
        return given_bytes(name, count, number, device)
    return CODECS[name].encode(golden_contribution(count, number, device), NoiseKey(7, 0, f"m{number:02}"))


def reduced_digest(name: str, device: str) -> str:
    """Worked out on one device, span by span: this is what members on different devices must agree on."""
    codec, count = CODECS[name], 23 * PAGE + 77
    total = torch.zeros(count, device=device)
    for number, weight in enumerate(WEIGHTS):
        codec.accumulate(encoded_contribution(name, count, number, device), total, weight / sum(WEIGHTS))
    return digest(codec_named(result_codec_for(name, len(MEMBERS))).encode(total, RESULT_KEY))


def digest(*tensors: torch.Tensor) -> str:
    return sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def golden_digest(name: str, device: str) -> str:
    """Of encode(x) and decode(encode(x)), where integer arithmetic makes x: only the codec is under test."""
    index = torch.arange(3 * PAGE + 321, dtype=torch.int64, device=device)
    values = ((index * 2654435761) % 65537 - 32768).float() / 4096 * ((index % 9) + 1).float()
    values[:256] = (index[:256] % 2 * 2 - 1) * 1e-42  # denormals beside a one
    values[7] = 1.0
    given = name in SENDER_ONLY
    payload = given_bytes(name, len(values), 0, device) if given else CODECS[name].encode(values, KEY)
    decoded = CODECS[name].decode(payload, len(values))
    return digest(payload, decoded)


if __name__ == "__main__":
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for name in CODECS:
            for made, expected in ((golden_digest, GOLDEN), (reduced_digest, REDUCED)):
                found = made(name, device)
                print(device, name, made.__name__, found, "as expected" if found == expected.get(name) else "DIFFERS")
