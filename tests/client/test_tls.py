"""Both clients over TLS: which certificates they accept."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from client.fake import FakeServer
from tickwheel.client import Client, ServerUnavailable


def certificate(folder, name):
    """Write a self-signed certificate for `name`, with its key, to a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, *form)
    )
    return path


def serve(path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return FakeServer(context)


def test_a_given_certificate_authority_is_trusted(make, tmp_path):
    path = certificate(tmp_path, "localhost")
    with serve(path) as server:
        client = make(server.url, "a-token", ssl=ssl.create_default_context(cafile=path))
        for _ in range(3):
            client.list()
        assert server.accepted == 1
        assert server.asked[0].headers["authorization"] == "Bearer a-token"


def test_an_untrusted_server_gets_no_request(make, tmp_path):
    with serve(certificate(tmp_path, "localhost")) as server:
        client = make(server.url, "a-token", retries=0)
        with pytest.raises(ServerUnavailable, match=r"is refused: .*SSL_CERT_FILE") as refused:
            client.list()
        assert not refused.value.sent
        assert server.asked == []


def test_a_certificate_for_another_name_is_refused(make, tmp_path):
    path = certificate(tmp_path, "elsewhere")
    with serve(path) as server:
        client = make(server.url, retries=0, ssl=ssl.create_default_context(cafile=path))
        with pytest.raises(ServerUnavailable, match="certificate is refused"):
            client.list()
        assert server.asked == []


def test_a_server_that_speaks_plain_http_is_reported():
    with FakeServer() as plain:
        client = Client(plain.url.replace("http:", "https:"), retries=0)
        with pytest.raises(ServerUnavailable, match=r"does it speak http\?"):
            client.list()
