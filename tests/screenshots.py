"""Take the pictures of the dashboard that the documentation shows: python tests/screenshots.py

A made run (`diloco/bench/made_run.py`) goes on for a while, one of its islands is killed, and a headless Chromium looks
at it: a laptop by day and by night, and a phone.
"""

import base64
import tempfile
import time
from contextlib import closing
from pathlib import Path

from diloco.bench.browser import LAPTOP, PHONE, Tab, open_browser
from diloco.bench.made_run import MadeRun
from diloco.dashboard.beside import Beside

IMAGES = Path(__file__).parents[1] / "docs" / "img"
NAMES = ["amsterdam", "basel", "cork", "dakar", "eindhoven", "fukuoka"]
PICTURES = {
    "dashboard": (LAPTOP, False, 1500), "dashboard-dark": (LAPTOP, True, 900), "dashboard-phone": (PHONE, False, 1500),
}  # fmt: skip


def main() -> None:
    names = {f"island-{number}": name for number, name in enumerate(NAMES, start=1)}
    with (
        tempfile.TemporaryDirectory() as place,
        MadeRun(Path(place) / "islands", len(NAMES), 150, names=names) as run,
        closing(Beside(run.folder, "127.0.0.1", None)) as beside,
        open_browser() as browser,
    ):
        time.sleep(20)
        run.kill("island-4")
        time.sleep(10)
        for name, (device, dark, height) in PICTURES.items():
            tab = Tab(browser)
            tab.look_like(device, dark=dark)
            tab.open(beside.url)
            tab.wait("document.querySelector('.plot .main-svg') !== null")
            time.sleep(3)
            take(tab, IMAGES / f"{name}.webp", height)
            tab.close()


def take(tab: Tab, path: Path, height: int) -> None:
    """Write the top of a page as WebP."""
    width = tab.run("document.documentElement.clientWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    options = {"format": "webp", "quality": 80, "captureBeyondViewport": True, "clip": clip}
    path.write_bytes(base64.b64decode(tab.ask("Page.captureScreenshot", **options)["data"]))
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
