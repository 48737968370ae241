"""Until when certificates are valid, read from wherever they lie in the folder of a federation or of a site."""

import contextlib
import math
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

DAY = 86_400.0
SOON = 30
"""Days before the end from which people are reminded."""
AUTHORITY = "(authority)"
OURS = ("server/startup", "coordinator", "authority", "kits", "certificates", "requests")
"""Where a coordinator's folder has certificates. Jobs and runs may have some, too, but they are copies."""


def of_federation(folder: Path) -> dict[str, float]:
    """When the certificate of each name ends, in seconds since 1970: of parties, the server's host, administrators
    (``name@federation.org``), and the authority. The last one counts where there are several.
    """
    files = [path for part in OURS for path in sorted((folder / part).rglob("*")) if path.is_file()]
    return _latest(content for path in files for content in _contents(path))


def of_site(folder: Path) -> dict[str, float]:
    """The same for a site: its own certificate, and that of the authority."""
    files = [path for path in sorted((folder / "startup").glob("*")) if path.is_file()]
    return _latest(content for path in files for content in _contents(path))


def days_left(end: float | None) -> int | None:
    """Whole days from now until then; negative if it is past."""
    return None if end is None else math.floor((end - time.time()) / DAY)


def of_party(ends: Mapping[str, float], name: str) -> float | None:
    """The end of a party's certificate, whatever its role."""
    return next((end for known, end in ends.items() if known.partition("@")[0] == name), None)


def _contents(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError, zipfile.BadZipFile, KeyError, RuntimeError, NotImplementedError):
        if path.suffix in (".crt", ".pem"):
            yield path.read_bytes()
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as kit:
                for name in kit.namelist():
                    if name.endswith((".crt", ".pem")):
                        yield kit.read(name)


def _latest(contents: Iterator[bytes]) -> dict[str, float]:
    from cryptography import x509  # comes with FLARE

    ends: dict[str, float] = {}
    for content in contents:
        with contextlib.suppress(ValueError, x509.ExtensionNotFound):
            for certificate in x509.load_pem_x509_certificates(content):
                names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
                name = AUTHORITY if certificate.issuer == certificate.subject else str(names[0].value if names else "")
                ends[name] = max(ends.get(name, 0.0), certificate.not_valid_after_utc.timestamp())
    return ends
