"""Which URLs and addresses a request may lead this server to. Pure. Called by fetch.py."""

import ipaddress
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from meshlm.mediaproc.events import Refusal

PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address is in its last 32 bits
LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


class Refused(Exception):
    """A URL, or what it leads to, is not taken."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def refused(text: str) -> Refused:
    return Refused(Refusal(text))


def checked_url(url: str, domains: Collection[str]) -> tuple[SplitResult, str, int]:
    """An http(s) URL, its host and port. Refused. domains: the hosts that may be named; empty: all."""
    try:
        split = urlsplit(url)
        host, port = (split.hostname or "").rstrip("."), split.port
    except ValueError:
        raise refused("is no URL") from None
    if split.scheme not in PORTS:
        raise refused(f"URLs of {split.scheme[:20] or 'no scheme'} are not taken; send http, https or data")
    if not host or any(not 32 < ord(letter) < 127 for letter in url):
        raise refused("is no URL; letters beyond ASCII must be escaped")
    if split.username is not None or split.password is not None:
        raise refused("URLs with a user or a password are not taken")
    if domains and host not in domains:
        raise refused(f"the host {host[:100]} is not among those that may be named (--allowed-media-domains)")
    return split, host, port or PORTS[split.scheme]


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, in whatever form: not of this host, its link, or a private network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found.teredo is not None or found in LOCAL_NAT64:
            return False
        if found in NAT64 or int(found) >> 32 == 0:  # the last: IPv4-compatible, long out of use
            inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
