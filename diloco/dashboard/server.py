"""Serve the dashboard: a page, its parts, and a stream of server-sent events. There is nothing else, and all of it is
for reading.

It listens on this machine only, unless told otherwise; then its address has a token that nobody guesses. Requests whose
`Host` is a name that this machine does not have are refused: a page elsewhere could let its own name point here.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from diloco.dashboard.feed import Feed
from diloco.errors import DeviceError, MissingExtra
from diloco.report.admitted import is_own_host
from diloco.report.page import ASSETS, POLICY, asset, live_page, plotting_library
from diloco.report.watching import give_way

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PORT = 7117  # or any other, if that is taken and nobody has asked for it
MAX_VIEWERS = 64
AGAIN_S = 3.0  # after which a view or a problem is told again: the page knows by it that we are there
BEAT_S = 10.0  # a comment that finds out who is gone
RETRY_MS = 1000  # after which a browser connects again
LEAVE_S = 1.0  # for viewers, when the server ends
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store",
}  # fmt: skip
NEEDED = ("starlette", "uvicorn", "plotly")

log = logging.getLogger(__name__)


def need_dashboard() -> None:
    """Raise MissingExtra if a package is missing."""
    for package in NEEDED:
        if find_spec(package) is None:
            raise MissingExtra(package, "dashboard", "the dashboard")


@dataclass(frozen=True)
class Door:
    """Hold where a dashboard is reached, and what a request must bring."""

    listener: socket.socket
    host: str  # as it was asked for
    token: str  # empty on loopback

    @property
    def url(self) -> str:
        """Return the address to open in a browser; the token is in it."""
        address, port = self.listener.getsockname()[:2]
        shown: str = _reachable_name() if ipaddress.ip_address(address).is_unspecified else address
        shown = f"[{shown}]" if ":" in shown else shown
        return f"http://{shown}:{port}/{self.token + '/' if self.token else ''}"

    def admits(self, host: str) -> bool:
        """Tell whether a request's `Host` is this machine, by an address or by a name that nobody else can have."""
        return is_own_host(host, self.host)

    def path_within(self, path: str) -> str | None:
        """Return a request's path without the token; None if it lacks that."""
        if not self.token:
            return path
        given, slash, rest = path.removeprefix("/").partition("/")
        return slash + rest if slash and hmac.compare_digest(given.encode(), self.token.encode()) else None


def open_door(host: str, port: int | None) -> Door:
    """Listen at a host's address; without a port at the usual one, or at any if that is taken. Raise DeviceError where
    that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, PORT if port is None else port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise DeviceError(f"--host {host}: {error}; name an address of this machine") from None
    tries = [PORT, 0] if port is None else [port]
    for number, asked in enumerate(tries, start=1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], asked, *address[2:]))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if number == len(tries):
                raise DeviceError(
                    f"the dashboard cannot listen at {host}:{asked} ({error.strerror}): choose another --port, or "
                    "leave it out for a free one"
                ) from None
            continue
        loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        return Door(listener, host, "" if loopback else secrets.token_urlsafe(18))
    raise AssertionError("one of the tries returns or raises")


def _reachable_name() -> str:
    """Return an address of this machine for whoever is elsewhere; its name, if no address leads outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


class Guard:
    """Refuse requests for other hosts, without the token, or that are not for reading; add headers to answers."""

    def __init__(self, app: "ASGIApp", door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a request on if it may be answered."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        from starlette.responses import PlainTextResponse

        sent = dict(scope["headers"])
        path = self._door.path_within(scope["path"])
        if not self._door.admits(sent.get(b"host", b"").decode("latin-1")):
            answer = PlainTextResponse("this is not the host that you look for", 421, headers=HEADERS)
        elif path is None:
            answer = PlainTextResponse("the address lacks its token", 403, headers=HEADERS)
        elif scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse("there is nothing here but to read", 405, headers=HEADERS)
        else:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
            return
        await answer(scope, receive, send)


def application(feed: Feed, door: Door) -> Guard:
    """Return the ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    texts = {name: asset(name).encode() for name in ASSETS} | {"plotly.js": plotting_library().encode()}
    watching: set[object] = set()

    async def page(request: Request) -> Response:
        return HTMLResponse(live_page(), headers=HEADERS)

    async def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in texts:
            return PlainTextResponse("there is no such part", 404, headers=HEADERS)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(texts[name], media_type=kind, headers=HEADERS)

    async def events(request: Request) -> Response:
        if len(watching) >= MAX_VIEWERS:
            return PlainTextResponse(f"{MAX_VIEWERS} viewers are here already", 503, headers=HEADERS)
        return StreamingResponse(viewer(request), media_type="text/event-stream", headers=HEADERS)

    async def viewer(request: Request) -> AsyncIterator[str]:
        me = object()
        watching.add(me)
        try:
            async for text in stream(feed, request.headers.get("last-event-id", "")):
                yield text
        finally:
            watching.discard(me)

    app = Starlette(routes=[Route("/", page), Route("/assets/{name}", part), Route("/events", events)])
    return Guard(app, door)


async def stream(feed: Feed, place: str) -> AsyncIterator[str]:
    """Yield server-sent events: what a viewer lacks that was told everything up to a place, then what is new."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    leave = feed.listen(lambda: loop.call_soon_threadsafe(news.set))
    told, said, said_at = "", "", 0.0
    try:
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            problem, (there, message) = feed.problem, feed.news(place)
            again = loop.time() - said_at > AGAIN_S
            # a page that gets a view is live: while the run cannot be seen it gets only the rows that it lacks
            if message and (there != place or (not problem and (told or again or message != said))):
                yield f"id: {there}\nevent: view\ndata: {message}\n\n"
                place, said, said_at, told = there, message, loop.time(), ""
            if problem and (again or problem != told):
                yield f"event: problem\ndata: {json.dumps(problem)}\n\n"
                told, said_at = problem, loop.time()
            while True:
                try:
                    await asyncio.wait_for(news.wait(), BEAT_S)
                    break
                except TimeoutError:
                    yield ": still here\n\n"
            news.clear()
    finally:
        leave()


def serve(feed: Feed, door: Door) -> None:
    """Answer requests until SIGINT or SIGTERM; viewers are let go."""
    import uvicorn

    give_way()
    config = uvicorn.Config(
        application(feed, door), log_level="error", access_log=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=int(LEAVE_S), log_config=None, proxy_headers=False,
    )  # fmt: skip
    feed.start()
    try:
        uvicorn.Server(config).run(sockets=[door.listener])
    finally:
        feed.close()
        door.listener.close()
