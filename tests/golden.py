"""Golden digests of the codecs. `python tests/golden.py` prints them for every device of a machine, without pytest."""

from hashlib import sha256

import torch

from diloco.comm.codec import CODECS
from diloco.comm.noise import PAGE, NoiseKey

KEY = NoiseKey(round=3, fragment=0, role="a")
GOLDEN = {
    "fp32": "cad21950294c0a90",
    "bf16": "98e33a13773f6d3f",
    "int8": "b1e07e2e5f873c92",
    "int4": "7685260207de2164",
    "fp4": "414b8802337e0809",
}

REDUCED = {  # of the weighted mean of four contributions, as an all-reduce must give it
    "fp32": "43bb26bbd05c61a8",
    "bf16": "a6444733e263c31c",
    "int8": "477f4b9c624669f6",
    "int4": "89337e20def1fbd9",
    "fp4": "d75e54a5a504d044",
}
MEMBERS = ("m00", "m01", "m02", "m03")
WEIGHTS = (1, 2, 3, 4)
RESULT_KEY = NoiseKey(round=7, fragment=0, role="result")


def golden_contribution(count: int, member: int, device: str = "cpu") -> torch.Tensor:
    index = torch.arange(count, dtype=torch.int64, device=device)
    return ((index * (2654435761 + 2 * member)) % 65537 - 32768).float() / 4096 * ((index % 9) + 1 + member).float()


def reduced_digest(name: str, device: str) -> str:
    """Worked out on one device, span by span: this is what members on different devices must agree on."""
    codec, count = CODECS[name], 23 * PAGE + 77
    total = torch.zeros(count, device=device)
    for number, (member, weight) in enumerate(zip(MEMBERS, WEIGHTS, strict=True)):
        contribution = codec.encode(golden_contribution(count, number, device), NoiseKey(7, 0, member))
        codec.accumulate(contribution, total, weight / sum(WEIGHTS))
    return digest(codec.encode(total, RESULT_KEY))


def digest(*tensors: torch.Tensor) -> str:
    return sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def golden_digest(name: str, device: str) -> str:
    """Of encode(x) and decode(encode(x)), where integer arithmetic makes x: only the codec is under test."""
    index = torch.arange(3 * PAGE + 321, dtype=torch.int64, device=device)
    values = ((index * 2654435761) % 65537 - 32768).float() / 4096 * ((index % 9) + 1).float()
    values[:256] = (index[:256] % 2 * 2 - 1) * 1e-42  # denormals beside a one
    values[7] = 1.0
    payload = CODECS[name].encode(values, KEY)
    decoded = CODECS[name].decode(payload, len(values))
    return digest(payload, decoded)


if __name__ == "__main__":
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for name in CODECS:
            for made, expected in ((golden_digest, GOLDEN), (reduced_digest, REDUCED)):
                same = made(name, device) == expected[name]
                print(device, name, made.__name__, "as expected" if same else "DIFFERS")
