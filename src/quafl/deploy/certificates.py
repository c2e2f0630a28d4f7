"""Certificates: an authority's, the server's and the clients', what they say and until when they are good."""

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quafl.protocol.carrier import SERVER

SKEW = timedelta(minutes=5)  # by which clocks may differ: certificates begin that long before they are made
LIFETIME = timedelta(days=360) - SKEW
NEAR = (30, 7, 1, 0)  # days before a certificate's end at which it is warned of
PURPOSES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class ProvisionError(Exception):
    """One sentence about what is wrong with a federation's folder, a kit, a certificate, or a name."""


class Pair(NamedTuple):
    """A private key, and the certificate of its public one."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


class Peer(NamedTuple):
    """Whom a certificate names."""

    name: str
    serial: int
    expires: datetime
    is_client: bool


class Expiry:
    """When a certificate's end is to be spoken of: once each at 30, 7 and 1 days before it, and when it has come."""

    def __init__(self, name: str, expires: datetime) -> None:
        self._name, self._expires, self._told = name, expires, 0

    def due(self, now: datetime | None = None) -> str | None:
        """A sentence, if there is something new to say.

        >>> expiry = Expiry("north", datetime(2026, 11, 16, tzinfo=UTC))
        >>> expiry.due(datetime(2026, 11, 10, tzinfo=UTC))  # doctest: +ELLIPSIS
        "the certificate of north ends in 6 days, on 2026-11-16; the organiser renews it with 'quafl federation ...'"
        >>> expiry.due(datetime(2026, 11, 11, tzinfo=UTC))
        """
        left = self._expires - (now or datetime.now(UTC))
        passed = sum(left < timedelta(days=days) for days in NEAR)
        if passed <= self._told:
            return None
        self._told = passed
        soon = {0: "within a day", 1: "in 1 day"}.get(left.days, f"in {left.days} days")
        when = f"ends {soon}, on" if left >= timedelta() else "ended on"
        remedy = f"the organiser renews it with 'quafl federation renew {self._name}'"
        return f"the certificate of {self._name} {when} {self._expires:%Y-%m-%d}; {remedy}"


def read_peer(pem: bytes) -> Peer:
    """Whom a certificate names that TLS has verified; a client's can be used for nothing else."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        (subject,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        found = [extension.value for extension in certificate.extensions]
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ProvisionError(f"the certificate is not of a QuAFL federation: {error}") from error
    name = str(subject.value)
    is_client = all(extension in found for extension in _client(name))
    return Peer(name, certificate.serial_number, certificate.not_valid_after_utc, is_client)


def issue(authority: Pair, name: str, host: str, lifetime: timedelta = LIFETIME) -> Pair:
    """A new key and its certificate for a client, or for the server, which is at this host. It is good from now on, and
    never longer than the authority."""
    issuer, end = authority.certificate, authority.certificate.not_valid_after_utc
    if datetime.now(UTC) > end:
        raise ProvisionError(f"the authority ended on {end:%Y-%m-%d}; make a new one with 'quafl federation init'")
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _certificate(name, issuer.subject, key, min(datetime.now(UTC) + lifetime, end))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    for extension in _server(host) if name == SERVER else _client(name):
        builder = builder.add_extension(extension, critical=False)
    return Pair(key, builder.sign(authority.key, hashes.SHA256()))


def found(lifetime: timedelta) -> Pair:
    """An authority, which may name parties, but no further authorities."""
    key, name = ec.generate_private_key(ec.SECP256R1()), "QuAFL authority"
    builder = (
        _certificate(name, _subject(name), key, datetime.now(UTC) + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign"), critical=True)
    )
    return Pair(key, builder.sign(key, hashes.SHA256()))


def _certificate(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime
) -> x509.CertificateBuilder:
    """What every certificate says."""
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(purpose: str) -> x509.KeyUsage:
    """For one purpose only."""
    return x509.KeyUsage(**{**dict.fromkeys(PURPOSES, False), purpose: True})


def _server(host: str) -> tuple[x509.ExtensionType, ...]:
    """What makes a certificate a server's."""
    names: list[x509.GeneralName] = []
    for one in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            names.append(x509.DNSName(one))
    return x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), x509.SubjectAlternativeName(names)


def _client(name: str) -> tuple[x509.ExtensionType, ...]:
    """What makes a certificate a client's. Its alternative name is no host's; without one, gRPC would take the
    common name for a host's."""
    alternative = x509.UniformResourceIdentifier(f"quafl:client/{name}")
    return x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), x509.SubjectAlternativeName([alternative])


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: str | None = None) -> bytes:
    """A key as a file has it, encrypted if there is a passphrase."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        if not 0 < len(passphrase.encode()) < 1024:
            raise ProvisionError("a passphrase must not be empty, nor longer than 1,023 bytes")
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as a file has it."""
    return certificate.public_bytes(serialization.Encoding.PEM)
