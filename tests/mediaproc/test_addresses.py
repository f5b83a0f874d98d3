"""Addresses that a request may not lead this server to, in all their forms."""

import pytest

from meshlm.mediaproc.addresses import Refused, checked_url, is_public

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:1:2::3",
    "nonsense",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_none_of_the_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_an_address_of_the_internet(address: str) -> None:
    assert is_public(address)


def test_a_host_must_be_named() -> None:
    assert checked_url("https://a.example/b.png", ("a.example",))[1:] == ("a.example", 443)
    for url in ("https://b.example/", "https://a.example.evil/", "https://a.example@evil.example/"):
        with pytest.raises(Refused):
            checked_url(url, ("a.example",))
