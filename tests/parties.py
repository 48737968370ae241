"""An authority with a server, sites and an administrator, as FLARE makes their certificates, and their TLS contexts."""

import datetime
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

HOST = "server.example.org"


class Authority:
    """Makes the folder ``startup`` of each party."""

    def __init__(self, folder: Path, name: str = "hospitals") -> None:
        self.folder, self.name = folder, name
        self.key, public = generate_keys()
        self.root = generate_cert(Identity(name), Identity(name), self.key, public, ca=True)

    def party(self, name: str, kind: str = "client", role: str | None = None, days: int = 360, **more: Any) -> Path:
        place = self.folder / f"{self.name} {name} {kind} {role} {days} {' '.join(more)}"
        if not place.exists():
            place.mkdir(parents=True)
            key, public = generate_keys()
            then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
            made = generate_cert(
                Identity(name, "org", role), Identity(self.name), self.key, public, days, not_valid_before=then, **more
            )
            (place / f"{kind}.key").write_bytes(serialize_pri_key(key))
            (place / f"{kind}.crt").write_bytes(serialize_cert(made))
            (place / "rootCA.pem").write_bytes(serialize_cert(self.root))
        return place

    def server(self) -> Path:
        return self.party(HOST, "server", server_default_host=HOST)

    def client_context(self, name: str) -> ssl.SSLContext:
        """How a party connects to the server."""
        place = self.party(name)
        context = ssl.create_default_context(cafile=str(place / "rootCA.pem"))
        context.check_hostname = False
        context.load_cert_chain(place / "client.crt", place / "client.key")
        return context


def only_for(use: str) -> list[tuple[Any, bool]]:
    """The extension of a certificate that may serve, or connect, but not both."""
    uses = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
    return [(x509.ExtendedKeyUsage([uses[use]]), False)]
