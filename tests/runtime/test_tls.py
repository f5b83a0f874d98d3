"""Certificates and keys that cannot be used are said in one line that names flag and file."""

from pathlib import Path

import pytest
import trustme

from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.runtime import tls
from meshlm.supervisor.cli.serve import with_files
from meshlm.supervisor.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    mine, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(found / "ca.pem")
    mine.private_key_and_cert_chain_pem.write_to_path(found / "both.pem")
    mine.private_key_pem.write_to_path(found / "key.pem")
    mine.cert_chain_pems[0].write_to_path(found / "cert.pem")
    other.private_key_pem.write_to_path(found / "other.pem")
    return found


CERT, KEY = "cert.pem", "key.pem"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ssl_keyfile": KEY}, "--ssl-keyfile: it needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs: it needs --ssl-certfile"),
        ({"ssl_certfile": "none.pem"}, "--ssl-certfile FOLDER/none.pem: No such file or directory"),
        ({"ssl_certfile": CERT}, "--ssl-certfile FOLDER/cert.pem: no PEM of the kind"),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": "other.pem"},
            "--ssl-certfile FOLDER/cert.pem --ssl-keyfile FOLDER/other.pem: key values mismatch",
        ),
        (
            {"ssl_certfile": "both.pem", "ssl_cert_reqs": 2},
            "--ssl-cert-reqs 2: certificates of clients need --ssl-ca-certs",
        ),
        (
            {"ssl_certfile": "both.pem", "ssl_ca_certs": KEY, "ssl_cert_reqs": 2},
            "--ssl-ca-certs FOLDER/key.pem: no certificate or crl found",
        ),
        ({"ssl_certfile": "both.pem", "ssl_ciphers": "NONE"}, "--ssl-ciphers NONE: no usable cipher"),
        (
            {"ssl_certfile": "both.pem", "grpc": True, "ssl_cert_reqs": 1, "ssl_ca_certs": "ca.pem"},
            "--grpc: it has no --ssl-cert-reqs 1 and no --ssl-ciphers",
        ),
    ],
)
def test_one_line(folder: Path, given: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of the folder in which `meshlm serve` was typed."""
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError) as told:
        with_files(MeshConfig(server=ServerConfig(**given)))  # type: ignore[arg-type]
    assert str(told.value) == says.replace("FOLDER", str(folder))


def test_a_key_with_a_password_does_not_ask_for_it(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key((folder / KEY).read_bytes(), None)
    secret = forms.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.TraditionalOpenSSL, secret)
    (folder / "secret.pem").write_bytes(pem)
    server = ServerConfig(ssl_certfile=str(folder / CERT), ssl_keyfile=str(folder / "secret.pem"))
    with pytest.raises(tls.TLSError, match=r"^--ssl-certfile \S+ --ssl-keyfile \S+/secret.pem: "):
        tls.make_context(server)


def test_files_that_are_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = with_files(MeshConfig(server=ServerConfig(ssl_certfile=CERT, ssl_keyfile=KEY))).server
    assert (found.ssl_certfile, found.ssl_keyfile, found.ssl_ca_certs) == (str(folder / CERT), str(folder / KEY), "")
    assert tls.make_context(found) is not None
    assert tls.make_context(ServerConfig()) is None
