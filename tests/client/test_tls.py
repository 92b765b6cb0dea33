"""Both clients over TLS: whom they believe."""

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
    """A file with a certificate for `name`, signed by itself, and its key."""
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


def serving(path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return FakeServer(context)


def test_a_server_is_believed_by_the_authority_that_was_given(make, tmp_path):
    path = certificate(tmp_path, "localhost")
    with serving(path) as server:
        client = make(server.url, "a-token", ssl=ssl.create_default_context(cafile=path))
        for _ in range(3):
            client.list()
        assert server.accepted == 1
        assert server.asked[0].headers["authorization"] == "Bearer a-token"


def test_a_server_that_nobody_vouches_for_hears_nothing(make, tmp_path):
    with serving(certificate(tmp_path, "localhost")) as server:
        client = make(server.url, "a-token", retries=0)
        with pytest.raises(ServerUnavailable, match="certificate is refused") as refused:
            client.list()
        assert not refused.value.sent
        assert server.asked == []


def test_a_server_with_anothers_name_hears_nothing(make, tmp_path):
    path = certificate(tmp_path, "elsewhere")
    with serving(path) as server:
        client = make(server.url, retries=0, ssl=ssl.create_default_context(cafile=path))
        with pytest.raises(ServerUnavailable, match="certificate is refused"):
            client.list()
        assert server.asked == []


def test_a_server_that_speaks_plain_http_is_told_of_as_that():
    with FakeServer() as plain:
        client = Client(plain.url.replace("http:", "https:"), retries=0)
        with pytest.raises(ServerUnavailable, match=r"does it speak http\?"):
            client.list()
