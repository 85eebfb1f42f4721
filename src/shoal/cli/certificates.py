"""``shoal certificates``: an authority for one job, and a certificate for each of its ranks, for ``SHOAL_TLS=on``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ..transport.tls import AUTHORITY, REVOKED, host_name

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    HAS_CRYPTOGRAPHY = True
except ImportError:
    HAS_CRYPTOGRAPHY = False

DEFAULT_DAYS = 7
AUTHORITY_KEY = "ca.key"
_CLOCKS_DIFFER = timedelta(hours=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    make = commands.add_parser("make", help="make an authority, if there is none, and what ranks have no certificate")
    make.add_argument("-n", "--agents", type=int, required=True, metavar="N", help="how many agents the job has")
    make.add_argument(
        "--days", type=float, default=DEFAULT_DAYS, help=f"how long they are good for; {DEFAULT_DAYS} if not given"
    )
    revoke = commands.add_parser("revoke", help="take the certificates of ranks back; make gives them others")
    revoke.add_argument("ranks", type=int, nargs="+", metavar="RANK")
    show = commands.add_parser("show", help="list them")
    for command in (make, revoke, show):
        command.add_argument("--folder", type=Path, default=Path("certificates"), help="where they are; ./certificates")


def run(args: argparse.Namespace) -> int:
    if not HAS_CRYPTOGRAPHY:
        print("shoal certificates: this needs cryptography: pip install 'shoal[tls]'", file=sys.stderr)
        return 2
    try:
        if args.command == "make":
            make(args.folder, args.agents, timedelta(days=args.days))
        elif args.command == "revoke":
            revoke(args.folder, args.ranks)
        for line in show(args.folder):
            print(line)
        if args.command == "make":
            print(f"\nexport SHOAL_TLS=on SHOAL_CERTIFICATES={args.folder.resolve()}")
    except (OSError, ValueError, OverflowError) as error:
        print(f"shoal certificates: {error}", file=sys.stderr)
        return 2
    return 0


def make(folder: Path, agents: int, good_for: timedelta = timedelta(days=DEFAULT_DAYS)) -> None:
    """Make an authority in a folder, if it has none, and a certificate for each rank that has none.

    Args:
        folder: Made if it is not there; only its owner may enter it.
        agents: How many ranks.
        good_for: How long from now; of an authority that is there already, not longer than it.

    Raises:
        ValueError: A number is invalid, or the folder has an authority without its key.
    """
    if agents < 1 or good_for <= timedelta():
        raise ValueError(f"{agents} agents for {good_for.total_seconds() / 86400:g} days: both must be positive")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / AUTHORITY).exists():
        _make_authority(folder, good_for)
    authority, key = _authority(folder)
    for rank in range(agents):
        if not (folder / f"rank-{rank}.crt").exists():
            _make_certificate(folder, rank, authority, key, good_for)


def revoke(folder: Path, ranks: Iterable[int]) -> None:
    """Take the certificates of ranks back: put them on the list of revoked ones, and remove them here.

    Raises:
        ValueError: A rank has none; nothing has been changed.
    """
    authority, key = _authority(folder)
    serials = {rank: _certificate(folder / f"rank-{rank}.crt").serial_number for rank in ranks}
    _write_revoked(folder, authority, key, [*_revoked(folder), *serials.values()])
    for rank in serials:
        (folder / f"rank-{rank}.key").unlink(missing_ok=True)
        (folder / f"rank-{rank}.crt").unlink()


def show(folder: Path) -> Iterator[str]:
    """A line for each certificate in a folder, by rank.

    Raises:
        ValueError: There is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; --folder names where the certificates are")
    revoked = set(_revoked(folder))
    found = {int(path.stem.removeprefix("rank-")): path for path in folder.glob("rank-*.crt")}
    yield f"{folder}: {len(found)} certificates, {len(revoked)} revoked"
    for _, path in sorted(found.items()):
        certificate = _certificate(path)
        remaining = certificate.not_valid_after_utc - _now()
        state = "revoked" if certificate.serial_number in revoked else "expired" if remaining <= timedelta() else "good"
        yield f"  {path.name:<14} {state}, until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def _make_authority(folder: Path, good_for: timedelta) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("the agents of one Shoal job")
    builder = _begun(name, name, key, good_for)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write_key(folder / AUTHORITY_KEY, key)
    _write_revoked(folder, certificate, key, [])
    _write(folder / AUTHORITY, certificate)


def _make_certificate(
    folder: Path, rank: int, authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, good_for: timedelta
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    good_for = min(good_for, authority.not_valid_after_utc - _now())
    if good_for <= timedelta():
        raise ValueError(f"the authority in {folder} has expired; make certificates in another folder")
    builder = _begun(_name(host_name(rank)), authority.subject, key, good_for, signer)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host_name(rank))]), critical=False)
    _write_key(folder / f"rank-{rank}.key", key)
    _write(folder / f"rank-{rank}.crt", builder.sign(signer, hashes.SHA256()))


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    good_for: timedelta,
    signer: ec.EllipticCurvePrivateKey | None = None,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _CLOCKS_DIFFER).not_valid_after(_now() + good_for)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    signed_by = (signer or key).public_key()
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by), critical=False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write_revoked(
    folder: Path, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, serials: Iterable[int]
) -> None:
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(_now() - _CLOCKS_DIFFER).next_update(authority.not_valid_after_utc)
    for serial in serials:
        revoked_certificate = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_now()).build()
        builder = builder.add_revoked_certificate(revoked_certificate)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    _write(folder / REVOKED, builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256()))


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = _certificate(folder / AUTHORITY)
    try:
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {AUTHORITY_KEY}: certificates are made where their authority was") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return certificate, key


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None


def _revoked(folder: Path) -> list[int]:
    try:
        return [entry.serial_number for entry in x509.load_pem_x509_crl((folder / REVOKED).read_bytes())]
    except FileNotFoundError:
        return []


def _write(path: Path, signed: x509.Certificate | x509.CertificateRevocationList) -> None:
    whole = path.with_suffix(".new")
    whole.write_bytes(signed.public_bytes(Encoding.PEM))
    whole.replace(path)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)
