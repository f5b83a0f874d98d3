"""TLS of the port that clients meet: --ssl-certfile and its companions as an SSLContext.

The supervisor makes one to see that they are good, each frontend one to serve with.
"""

import ssl
from collections.abc import Callable
from pathlib import Path

from meshlm.protocol.config import ServerConfig


class TLSError(Exception):
    """The certificate or what goes with it cannot be used; one line."""


def make_context(server: ServerConfig) -> ssl.SSLContext | None:
    """None without --ssl-certfile. TLSError names the flag and the file."""
    if not server.ssl_certfile:
        others = {
            "--ssl-keyfile": server.ssl_keyfile,
            "--ssl-ca-certs": server.ssl_ca_certs,
            "--ssl-cert-reqs": server.ssl_cert_reqs,
            "--ssl-ciphers": server.ssl_ciphers,
            "--enable-ssl-refresh": server.enable_ssl_refresh,
        }
        for flag in (flag for flag, value in others.items() if value):
            raise TLSError(f"{flag}: it needs --ssl-certfile")
        return None
    if server.ssl_cert_reqs and not server.ssl_ca_certs:
        raise TLSError(f"--ssl-cert-reqs {server.ssl_cert_reqs}: certificates of clients need --ssl-ca-certs")
    if server.grpc and (server.ssl_cert_reqs == 1 or server.ssl_ciphers):
        raise TLSError("--grpc: it has no --ssl-cert-reqs 1 and no --ssl-ciphers")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    load(context, server)
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    if server.ssl_ciphers:
        _do(f"--ssl-ciphers {server.ssl_ciphers}", lambda: context.set_ciphers(server.ssl_ciphers))
    return context


def load(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Read certificate, key and authorities, which connections that follow have. TLSError, with which they have those before."""
    cert, key, authorities = server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs
    for flag, path in (("--ssl-certfile", cert), ("--ssl-keyfile", key), ("--ssl-ca-certs", authorities)):
        if path:
            _do(f"{flag} {path}", Path(path).read_bytes)
    if authorities:
        _do(f"--ssl-ca-certs {authorities}", lambda: context.load_verify_locations(authorities))
    pair = f"--ssl-certfile {cert}" + (f" --ssl-keyfile {key}" if key else "")
    # A key with a password asks for it on the terminal, unless it is given one.
    _do(pair, lambda: context.load_cert_chain(cert, key or None, password=lambda: ""))


def files(server: ServerConfig) -> tuple[str, ...]:
    return tuple(filter(None, (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)))


def _do(what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except ssl.SSLError as error:
        reason = getattr(error, "reason", None) or ("NO_USABLE_CIPHER" if "cipher" in what else "NO_PEM_OF_THE_KIND")
        raise TLSError(f"{what}: {reason.lower().replace('_', ' ').replace('pem', 'PEM')}") from None
    except OSError as error:
        raise TLSError(f"{what}: {error.strerror or error}") from None
