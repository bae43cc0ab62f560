"""Access: the web pages, host names and keys that the server answers."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterator
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Scope

from specdec_mlx.server.flags import ServerSettings, is_loopback
from specdec_mlx.server.requests import RequestError

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


def origins_of(settings: ServerSettings) -> re.Pattern[str]:
    """The pattern of all permitted origins. In --allowed-origins, * stands for any characters.

    A browser writes an origin in small letters and without the slash of its address bar.
    """
    origins = (origin.lower().rstrip("/") for origin in settings.allowed_origins)
    opened = (re.escape(origin).replace(r"\*", ".*") for origin in origins)
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
    if is_loopback(host) or {host, "*"} & {settings.host.lower(), *settings.allowed_hosts}:
        return True
    try:
        return ipaddress.ip_address(host) is not None and not is_loopback(settings.host)
    except ValueError:  # a name
        return False


def foreign_site_error(settings: ServerSettings, scope: Scope) -> RequestError | None:
    """The error for a request under a foreign name, or of a foreign page, or None."""
    for reason in _reasons_to_refuse(settings, Headers(scope=scope)):
        words = f"This server does not answer to {reason}"
        return RequestError(words, status=HTTPStatus.FORBIDDEN)
    return None


def _reasons_to_refuse(settings: ServerSettings, headers: Headers) -> Iterator[str]:
    """Names and pages that this server does not answer to, each with the next step.

    Browsers send the origin of a page with all that the page can read or post. For pictures, frames
    and links they say only that another site asks (Sec-Fetch-Site).
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    for host in hosts:
        if not permits_host(settings, host):
            yield (
                f"the name {host!r:.99}. Use its address, or start it with that name in "
                "--allowed-hosts."
            )
    permitted = origins_of(settings)
    for origin in origins:
        is_own = any(origin in (f"http://{host}", f"https://{host}") for host in hosts)
        if not is_own and not permitted.fullmatch(origin):
            yield (
                f"web pages of {origin!r:.99}. Start it with that origin in --allowed-origins if "
                "it should."
            )
    is_foreign = not origins and headers.get("sec-fetch-site") == "cross-site"
    if is_foreign and "*" not in settings.allowed_origins:
        yield "web pages of other sites. To see this address, type it into the browser."


def missing_key_error(settings: ServerSettings, scope: Scope) -> RequestError | None:
    """The error for a request without the server's key, or None, also if there is no key.

    The time that the comparison takes tells nothing of the key.
    """
    if (key := settings.api_key) is None or scope["path"] == OPEN_PATH:
        return None
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    for value in bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""):
        # starlette reads the bytes of headers as latin-1
        if hmac.compare_digest(value.strip().encode("latin-1"), key.encode()):
            return None
    return RequestError(
        "This server wants its API key, as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
        "invalid_api_key",
        status=HTTPStatus.UNAUTHORIZED,
    )
