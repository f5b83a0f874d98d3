"""Gets the bytes of what a request names: from http(s) and from files. Called by io.py in threads; blocks.

A host's name is resolved once, every address that it has must be allowed, and the connection goes to one of these: no later answer
of a name server matters. Redirects are not followed. Nothing but the URL is sent: no cookies, keys or proxies of this host.
"""

import http.client
import os
import socket
import ssl
import stat
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from meshlm.mediaproc.addresses import Refused, checked_url, is_public, refused
from meshlm.mediaproc.events import Refusal
from meshlm.protocol.config import MediaConfig
from meshlm.protocol.wire.ids import ErrorKind

PIECE = 1 << 16
HEADERS = {"User-Agent": "meshlm", "Accept": "image/*, video/*, audio/*", "Connection": "close"}
PRIVATE = "leads to this host or to a private network (--allow-private-media-addresses)"


def data_of(url: str, config: MediaConfig) -> bytes:
    """The bytes behind a URL. Refused."""
    if url.startswith("file:"):
        return _file(url, config)
    until = time.monotonic() + config.media_fetch_timeout
    try:
        return _fetched(url, config, until)
    except TimeoutError:
        raise refused(f"did not answer within {config.media_fetch_timeout:g} s (--media-fetch-timeout)") from None
    except ssl.SSLError as error:
        raise refused(f"cannot be fetched: {error.reason or 'TLS failed'}") from None
    except (OSError, http.client.HTTPException) as error:
        text = getattr(error, "strerror", None) or type(error).__name__
        raise refused(f"cannot be fetched: {text}") from None


def _fetched(url: str, config: MediaConfig, until: float) -> bytes:
    split, host, port = checked_url(url, config.allowed_media_domains)
    address = _address(host, port, config)
    target = (split.path or "/") + (f"?{split.query}" if split.query else "")
    connection = http.client.HTTPConnection(host, port, timeout=_left(until))
    raw = socket.create_connection((address, port), timeout=_left(until))
    try:
        if split.scheme == "https":
            raw.settimeout(_left(until))
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        connection.sock = raw
        connection.request("GET", target, headers=HEADERS)
        raw.settimeout(_left(until))
        answer = connection.getresponse()
        if 300 <= answer.status < 400:
            raise refused(f"answers {answer.status}; redirects are not followed: send the URL that it leads to")
        if answer.status != 200:
            raise refused(f"answers {answer.status}")
        if (length := answer.length) is not None and length > config.max_media_bytes:
            raise too_large(length, config)
        return _body(answer, raw, config, until)
    finally:
        connection.close()
        raw.close()


def _body(answer: http.client.HTTPResponse, raw: socket.socket, config: MediaConfig, until: float) -> bytes:
    found = bytearray()
    while True:
        raw.settimeout(_left(until))
        if not (piece := answer.read1(PIECE)):
            if answer.length:
                raise refused("the answer ends before its length")
            return bytes(found)
        found += piece
        if len(found) > config.max_media_bytes:
            raise too_large(len(found), config)


def _left(until: float) -> float:
    """Seconds until then. TimeoutError."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def too_large(size: int, config: MediaConfig) -> Refused:
    return refused(f"has {size} bytes or more; at most {config.max_media_bytes} (--max-media-bytes)")


def _address(host: str, port: int, config: MediaConfig) -> str:
    """An address of the host, all of whose addresses are allowed."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise refused(f"the host {host[:100]} is not known") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not config.allow_private_media_addresses and not all(map(is_public, addresses)):
        raise refused(PRIVATE)
    return addresses[0]


def _file(url: str, config: MediaConfig) -> bytes:
    """The bytes of a file below --allowed-local-media-path, links followed. Refused."""
    if not config.allowed_local_media_path:
        raise refused("this server takes no files of its host (--allowed-local-media-path)")
    split = urlsplit(url)
    if split.netloc not in ("", "localhost"):
        raise refused("a file: URL names a file of this host: file:///folder/name")
    outside = refused("no such file below --allowed-local-media-path")
    try:
        folder = Path(config.allowed_local_media_path).resolve(strict=True)
        path = Path(unquote(split.path, errors="strict")).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise outside from None
    if not path.is_relative_to(folder):
        raise outside
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise outside
            if info.st_size > config.max_media_bytes:
                raise too_large(info.st_size, config)
            return file.read(config.max_media_bytes)
    except OSError as error:
        raise Refused(Refusal(f"cannot be read: {error.strerror}", ErrorKind.INVALID)) from None
