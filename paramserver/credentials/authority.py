"""Certificates of a fleet, made: its CA, and one for each holder.

Invariants:
- only a relay's certificate can serve; all can call;
- a CA issues for holders, not for further CAs; two CAs of a fleet have different names, so that each certificate says
  whose it is;
- no certificate outlives its CA.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.access.certificates import read_cas
from protos.access.fleet import Identity
from protos.errors import InvalidRequest

CA_DAYS = 3650
BACKDATED = datetime.timedelta(minutes=5)
"""Hosts' clocks differ: a certificate is valid a little before it was made."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A CA with its private key: it issues."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self._key = certificate, key

    @classmethod
    def new(cls, now: datetime.datetime, days: int = CA_DAYS) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"laminar fleet CA {secrets.token_hex(4)}")
        builder = (
            _builder(name, name, key.public_key(), now, now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, certificates: bytes, key: bytes, source: str) -> Authority | None:
        """The one of `certificates` whose key this is; None where none is."""
        loaded = serialization.load_pem_private_key(key, password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise InvalidRequest(f"{source} is no key of a CA that `paramserver credentials init` made")
        public = loaded.public_key()
        return next((cls(one, loaded) for one in read_cas(certificates, source) if one.public_key() == public), None)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    def issue(self, identity: Identity, hosts: Sequence[str], days: int, now: datetime.datetime) -> Issued:
        """A certificate for `days`, or for as long as the CA has left. InvalidRequest for what is no host, and of a CA
        that has expired."""
        until = min(now + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        if until <= now:
            raise InvalidRequest(
                f"the CA expired on {until:%Y-%m-%d}", hint="`paramserver credentials rotate DIR` replaces it"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(identity.uri), *map(_host, hosts)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role == "relay":
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        own = self._key.public_key()
        builder = (
            _builder(_name(identity.name), self.certificate.subject, key.public_key(), now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "laminar"), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise InvalidRequest(
                f"{host[:80]!r} is no host", hint="a name, *. and the rest of a name, or an address"
            ) from None
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
