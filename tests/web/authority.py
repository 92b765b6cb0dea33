"""A certificate authority for tests, and a certificate of this host by it."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def key_usage(signs):
    """The key usage extension, which Python requires since 3.13."""
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


class Authority:
    """A certificate authority, and a certificate of this host by it."""

    def __init__(self, directory):
        now = datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tickwheel tests")])
        own = ec.generate_private_key(ec.SECP256R1())
        key = ec.generate_private_key(ec.SECP256R1())

        def made(subject, public, extension, *, ca):
            usage = x509.BasicConstraints(ca=ca, path_length=None)
            return (
                x509.CertificateBuilder()
                .subject_name(subject)
                .issuer_name(name)
                .public_key(public)
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - timedelta(hours=1))
                .not_valid_after(now + timedelta(hours=1))
                .add_extension(usage, critical=True)
                .add_extension(extension, critical=False)
                .add_extension(key_usage(ca), critical=True)
                .add_extension(
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key()),
                    critical=False,
                )
                .sign(own, hashes.SHA256())
            )

        alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        host = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        identifier = x509.SubjectKeyIdentifier.from_public_key(own.public_key())
        root = made(name, own.public_key(), identifier, ca=True)
        leaf = made(host, key.public_key(), alternative, ca=False)
        self.ca, self.cert, self.key = (directory / n for n in ("ca.pem", "cert.pem", "key.pem"))
        self.ca.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        self.cert.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
