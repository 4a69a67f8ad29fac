"""Golden digests of the codecs. `python tests/golden.py` prints them for every device of a machine, without pytest."""

from hashlib import sha256

import torch

from diloco.comm.codec import CODECS
from diloco.comm.noise import PAGE, NoiseKey

KEY = NoiseKey(round=3, fragment=0, role="a")
GOLDEN = {
    "fp32": "825bee3d3d016349",
    "bf16": "e6b659f91c100825",
    "int8": "2a18312966fdfcf1",
    "int4": "a431868183b9f223",
    "fp4": "de19ffec29e273ef",
}


def golden_digest(name: str, device: str) -> str:
    """Of encode(x) and decode(encode(x)), where integer arithmetic makes x: only the codec is under test."""
    index = torch.arange(3 * PAGE + 321, dtype=torch.int64, device=device)
    values = ((index * 2654435761) % 65537 - 32768).float() / 4096 * ((index % 9) + 1).float()
    payload = CODECS[name].encode(values, KEY)
    decoded = CODECS[name].decode(payload, len(values))
    return sha256(payload.cpu().numpy().tobytes() + decoded.cpu().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for name, expected in GOLDEN.items():
            print(device, name, "as expected" if golden_digest(name, device) == expected else "DIFFERS")
