"""Access: the web pages, host names and keys that the server answers."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_mlx.server.flags import ServerSettings, is_loopback

TRUSTED_ORIGINS = (
    r"https?://(localhost|tauri\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
    r"|(app|file|tauri|vscode-file|vscode-webview)://.*"
)
"""Pages of this machine and of applications on it; on Windows, Tauri's are of tauri.localhost.

A page of the Internet has none of these origins. The origin "null" is missing on purpose: a page of
the Internet gets it by means of a sandboxed frame.
"""

HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?")
"""A Host header: a name or an address, IPv6 in brackets, and a port."""

OPEN_PATH = "/health"  # answered without the key, for those who watch the server

Refuse = Callable[[Scope, HTTPStatus, str], ASGIApp]
"""Makes the response that refuses a request, from its scope, the status and the reason."""


def origins_of(settings: ServerSettings) -> re.Pattern[str]:
    """The pattern of all permitted origins. In --allowed-origins, * stands for any characters."""
    opened = (re.escape(origin).replace(r"\*", ".*") for origin in settings.allowed_origins)
    return re.compile("|".join([TRUSTED_ORIGINS, *opened]))


def permits_host(settings: ServerSettings, header: str) -> bool:
    """True for a Host header that names this server.

    A page of the Internet can have its own name resolved to this machine (DNS rebinding), and a
    browser then takes page and server for one site. It cannot do so with an address, which is why
    a server that others can reach is known by any address.
    """
    if (parts := HOST.fullmatch(header.strip().lower())) is None:
        return False
    host = parts[1].strip("[]")
    if is_loopback(host) or host == settings.host.lower():
        return True
    if any(name in ("*", host) for name in settings.allowed_hosts):
        return True
    return is_address(host) and not is_loopback(settings.host)


def is_address(host: str) -> bool:
    """True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def reason_to_refuse(
    settings: ServerSettings, permitted: re.Pattern[str], headers: Headers
) -> str | None:
    """The reason not to answer a request under a foreign name, or of a foreign page, or None.

    Browsers send the origin of a page with all that the page can read or post. For pictures, frames
    and links they say only that another site asks (Sec-Fetch-Site).
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    for host in hosts:
        if not permits_host(settings, host):
            return (
                f"This server does not answer to the name {host!r:.99}. Use its address, or start "
                "it with that name in --allowed-hosts."
            )
    for origin in origins:
        is_own = any(origin in (f"http://{host}", f"https://{host}") for host in hosts)
        if not is_own and not permitted.fullmatch(origin):
            return (
                f"This server does not answer to web pages of {origin!r:.99}. Start it with that "
                "origin in --allowed-origins if it should."
            )
    is_foreign = not origins and headers.get("sec-fetch-site") == "cross-site"
    if is_foreign and "*" not in settings.allowed_origins:
        return (
            "This server does not answer to web pages of other sites. To see this address, type "
            "it into the browser."
        )
    return None


def guarded(app: ASGIApp, settings: ServerSettings, refuse: Refuse) -> ASGIApp:
    """The application, which answers only what `reason_to_refuse` has no reason against."""
    permitted = origins_of(settings)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] == "http":
            reason = reason_to_refuse(settings, permitted, Headers(scope=scope))
            if reason is not None:
                answer = refuse(scope, HTTPStatus.FORBIDDEN, reason)
        await answer(scope, receive, send)

    return served


def keyed(app: ASGIApp, settings: ServerSettings, refuse: Refuse) -> ASGIApp:
    """The application, which answers only requests with the server's key, if there is a key."""
    if (key := settings.api_key) is None:
        return app

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] == OPEN_PATH
        answer = app
        if not is_open and not has_key(Headers(scope=scope), key):
            words = (
                "This server wants its API key, as `Authorization: Bearer KEY` or as "
                "`x-api-key: KEY`."
            )
            answer = refuse(scope, HTTPStatus.UNAUTHORIZED, words)
        await answer(scope, receive, send)

    return served


def has_key(headers: Headers, key: str) -> bool:
    """True if one of both headers has the key; the time that this takes tells nothing of it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")
    return any(
        # starlette reads the bytes of headers as latin-1
        hmac.compare_digest(one.strip().encode("latin-1"), key.encode())
        for one in keys
    )
