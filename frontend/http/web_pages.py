"""What web pages may ask of a server without an API key, and what they may do with its answers. Installed before CORS.

A browser sends what any page tells it to, to this host too, so without a key reaching the port proves nothing. A page reaches it in two
ways. It asks across origins: the browser says so (Origin, Sec-Fetch-Site), and no page can say that a body is JSON without a preflight.
Or it makes its own name lead here (DNS rebinding): then Host is a name that is not this host's. With a key neither helps, since no
browser adds one by itself.
"""

import base64
import hashlib
import ipaddress
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import structlog
from starlette.datastructures import Headers
from starlette.types import Scope

from meshlm.frontend.http.errors import OLLAMA, HttpError
from meshlm.frontend.http.operation import Paths
from meshlm.protocol.config import ServerConfig
from meshlm.runtime.process.logs import Limited

LOOPBACK = "localhost"
# Ends of names that nobody can register (RFC 6761, 6762, 8375, ICANN's .internal, Kubernetes): no page on the web has one.
PRIVATE_ENDS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc", ".cluster.local")
NOT_THIS_HOST = (
    "Forbidden: Host is {host!a}, which is no name of this host; a server without an API key takes no other, so that no web page can "
    "give itself out as it (DNS rebinding). Start it with --allowed-hosts NAME, or with --api-key"
)
OTHER_SITE = (
    "Forbidden: this comes from a web page of another origin ({origin!a}); a server without an API key takes that from none. Start it "
    "with --allowed-origins, or with --api-key"
)
NOT_JSON = (
    "Unsupported media type: a server without an API key takes bodies of the Content-Type {wanted}; this one's is {given!a}, which any "
    "web page can send. Send the header 'Content-Type: {wanted}' (curl: -H 'Content-Type: {wanted}', or --json in the place of -d)"
)
FORM, JSON = "multipart/form-data", "application/json"
CURL = "application/x-www-form-urlencoded"  # what curl -d says unless it is told
MAX_SHOWN = 200
_log = Limited(structlog.get_logger())


class WebPages:
    """The check of a Gate (endpoint.py)."""

    def __init__(self, server: ServerConfig, paths: Paths) -> None:
        self._paths = paths
        self._asks = not server.has_api_keys
        self._asks_host = not server.ssl_certfile  # a browser trusts no certificate but of the name that its page has
        self._origins = frozenset(server.cors_origins)
        # The address that is listened on, this machine's names, and --allowed-hosts.
        self._hosts = {*map(str.lower, server.allowed_hosts), server.address.lower(), *machine_names()}
        self._domains = tuple(name for name in self._hosts if name.startswith("."))
        self._is_local = server.is_local

    def check(self, scope: Scope) -> None:
        """HttpError for what a web page may have sent."""
        if not self._asks or scope["path"] in self._paths.probes:
            return
        try:
            self._check(scope)
        except HttpError as error:
            _log.warning("refused without a key", path=scope["path"], reason=error.message)
            raise

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (self._asks_host and not all(map(self._is_own, hosts))):
            shown = _name(hosts[0]) if len(hosts) == 1 else ", ".join(hosts)
            raise HttpError(403, NOT_THIS_HOST.format(host=shown[:MAX_SHOWN]))
        if not self._is_of_this_site(scope["method"], headers):
            origin = headers.get("origin") or f"Sec-Fetch-Site: {headers.get('sec-fetch-site')}"
            raise HttpError(403, OTHER_SITE.format(origin=origin[:MAX_SHOWN]))
        if "transfer-encoding" in headers or headers.get("content-length", "0") not in ("0", ""):  # it has a body
            takes = (FORM, JSON) if scope["path"] in self._paths.forms else (JSON,)
            if scope["path"].startswith(OLLAMA) and not {"origin", "sec-fetch-site"} & set(headers.keys()):
                takes = (JSON, CURL)  # its users write no content type, and no web page asks without these headers
            given = headers.get("content-type", "").partition(";")[0].strip().lower()
            if given not in takes and not (given.startswith("application/") and given.endswith("+json")):
                raise HttpError(415, NOT_JSON.format(wanted=takes[0], given=given[:MAX_SHOWN] or "none"))

    def _is_own(self, authority: str) -> bool:
        """Whether this Host is a name of this host, or one that no page on the web can have."""
        name = _name(authority)
        if name in self._hosts or "*" in self._hosts or name.endswith(self._domains):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            if name == LOOPBACK or name.endswith(f".{LOOPBACK}"):
                return True
            return not self._is_local and ("." not in name or name.endswith(PRIVATE_ENDS))
        return address.is_loopback or not self._is_local  # an address is nobody's name

    def _is_of_this_site(self, method: str, headers: Headers) -> bool:
        """Whether no page of another origin sent this, or one that may (--allowed-origins)."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or (origin is not None and origin in self._origins):
            return True
        if site == "same-origin":  # the page's own word cannot be this; a proxy may have changed Host
            return True
        if origin is not None:
            scheme, _, authority = origin.lower().partition("://")  # of `null` nothing
            port = {"http": ":80", "https": ":443"}.get(scheme, "")  # it may be left out
            host = headers.get("host", "").lower()
            return bool(authority) and authority.removesuffix(port) == host.removesuffix(port)
        if site in (None, "none"):  # no browser, or its user
            return True
        goes_there = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return goes_there and method in ("GET", "HEAD")  # a link was followed: the page that has it sees nothing


@cache
def machine_names() -> tuple[str, ...]:
    """The name of this machine, alone and with its domain, as far as /etc/hosts says it: no other machine is asked."""
    name = socket.gethostname().lower()
    return name, name.partition(".")[0], *_aliases(name, Path("/etc/hosts"))


def _aliases(name: str, hosts: Path) -> Iterator[str]:
    try:
        lines = hosts.read_text("utf-8").lower().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        names = line.partition("#")[0].split()[1:]
        if name in names:
            yield from names


def _name(authority: str) -> str:
    """Host without its port: `[::1]:80` is ::1."""
    text = authority.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


# Of data and files that are no page; a page has a policy of its own.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def source(text: str) -> str:
    """Names this text to a browser, which runs or applies no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
