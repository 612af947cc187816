"""A fleet's certificates: what they say, and whether they fit together.

Imports `cryptography`, which takes 0.1 s: imported only where there are credentials.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization

from protos.access.fleet import Identity, identity_of
from protos.errors import InvalidRequest

CAS_MAX = 2
"""CA certificates that are valid at a time: the present one, and the one before or after it."""
RENEW_HINT = "`paramserver credentials renew DIR` makes new certificates"


def read_certificates(pem: bytes, source: str) -> list[x509.Certificate]:
    """The certificates of a file, at least one. InvalidRequest names `source`."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidRequest(f"{source} has no certificate", hint="it is a file of PEM") from error
    return found


def read_cas(pem: bytes, source: str) -> list[x509.Certificate]:
    """One CA certificate, or two while one replaces the other."""
    found = read_certificates(pem, source)
    if len(found) > CAS_MAX:
        raise InvalidRequest(f"{source} has {len(found)} certificates", hint=f"{CAS_MAX} at most are valid at a time")
    return found


def identity_in(certificate: x509.Certificate) -> Identity:
    """InvalidRequest where it names no role of a fleet, or several."""
    return identity_of(_alternative_names(certificate, x509.UniformResourceIdentifier))


def hosts_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses that it proves to be its holder's."""
    addresses = _alternative_names(certificate, x509.IPAddress)
    return (*_alternative_names(certificate, x509.DNSName), *addresses)


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Whether clients that connect to `host` accept it: by its address, its name, or `*.` and the rest of its name."""
    name = host.lower().removeprefix("[").removesuffix("]")
    _, _, domain = name.partition(".")
    return bool({name, f"*.{domain}"} & {one.lower() for one in hosts_in(certificate)})


def check_pair(certificate: x509.Certificate, key_pem: bytes, source: str) -> None:
    """InvalidRequest unless `key_pem` is the certificate's private key. No part of the key is in a message."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise InvalidRequest(f"{source} has no private key, or an encrypted one", hint="it is a file of PEM") from error
    if _public(key.public_key()) != _public(certificate.public_key()):
        raise InvalidRequest(
            f"{source} is not the key of the certificate beside it", hint="copy all files of the directory"
        )


def check_issued(certificate: x509.Certificate, cas: Sequence[x509.Certificate], source: str) -> None:
    """InvalidRequest unless one of `cas` has issued it."""
    for ca in cas:
        try:
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):  # of another name; of another kind of key; forged
            continue
        return
    raise InvalidRequest(
        f"{source} was issued by no CA of the ca.pem beside it", hint="copy all files of the directory"
    )


def check_time(certificate: x509.Certificate, now_unix_s: float, source: str) -> None:
    """InvalidRequest where it has expired, or is not valid yet."""
    if now_unix_s >= expires_unix_s(certificate):
        raise InvalidRequest(f"{source} expired on {certificate.not_valid_after_utc:%Y-%m-%d}", hint=RENEW_HINT)
    if now_unix_s < certificate.not_valid_before_utc.timestamp():
        raise InvalidRequest(
            f"{source} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on", hint="check the clock"
        )


def expires_unix_s(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def fingerprint(certificate: x509.Certificate) -> str:
    """What tells two CAs apart for a person."""
    return certificate.fingerprint(hashes.SHA256()).hex()[:16]


def _alternative_names(certificate: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, kind)]


def _public(key: object) -> bytes:
    encoding = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(*encoding)  # type: ignore[attr-defined,no-any-return]
