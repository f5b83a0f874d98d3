"""TLS of a frontend's gRPC port: its files, which may change while it serves (--enable-ssl-refresh). Owned by listener.py."""

from pathlib import Path
from typing import Any

import grpc

from meshlm.frontend.http import watched_files
from meshlm.protocol.config import ServerConfig
from meshlm.runtime import tls


class Certificates:
    """The library asks for a new configuration at each handshake, in threads of its own; it gets one when the files have changed."""

    def __init__(self, server: ServerConfig) -> None:
        """ProcessFatal for files that cannot be used."""
        self._server = server
        self.serves = watched_files.tls_context(server) is not None
        self._new: Any = None  # a configuration that no handshake has fetched yet

    def credentials(self) -> "grpc.ServerCredentials | None":
        """None without a certificate."""
        if not self.serves:
            return None
        required = bool(self._server.ssl_cert_reqs)
        return grpc.dynamic_ssl_server_credentials(self._read(), self._fetch, require_client_authentication=required)

    def read_again(self) -> None:
        """Use the files for handshakes to come. TLSError for what cannot be used: those before hold."""
        tls.make_context(self._server)
        self._new = self._read()

    def _read(self) -> Any:
        server = self._server
        cert, key = Path(server.ssl_certfile).read_bytes(), Path(server.ssl_keyfile or server.ssl_certfile).read_bytes()
        authorities = Path(server.ssl_ca_certs).read_bytes() if server.ssl_ca_certs else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _fetch(self) -> Any:
        """None: the same as before."""
        new, self._new = self._new, None
        return new
