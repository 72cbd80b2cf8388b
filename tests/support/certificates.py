"""`Certificates`: an authority of its own, and what it has signed for this machine."""

import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "127.0.0.1"


class Certificates:
    """An authority of its own, and what it has signed: files in PEM."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = self._written("ca", self._signed("an authority", self._key.public_key(), is_ca=True))

    def make(self, name: str) -> tuple[str, str]:
        """A certificate for this machine, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_file = self.folder / f"{name}.key"
        key_file.write_bytes(key.private_bytes(*form))
        return self._written(name, self._signed(name, key.public_key(), is_ca=False)), str(key_file)

    def _signed(self, name: str, public: Any, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(_named(name)).issuer_name(_named("an authority"))
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))])
        return builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())

    def _written(self, name: str, certificate: x509.Certificate) -> str:
        path = self.folder / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
