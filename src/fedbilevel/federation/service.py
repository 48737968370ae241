"""Run for weeks: units for systemd, a file for containers, and the sign of life that a service manager waits for."""

import contextlib
import os
import pwd
import re
import shlex
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import health, project
from fedbilevel.federation.worker import SETTINGS

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), undefined=StrictUndefined, trim_blocks=True,
    keep_trailing_newline=True,
)  # fmt: skip
STATE = Path("/var/lib")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


def alive() -> None:
    """Tell systemd, if it started this process, that it is ready and does not hang."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)  # a manager that does not listen must not hold us up
        out.sendto(b"READY=1\nWATCHDOG=1", f"\0{address[1:]}" if address.startswith("@") else address)


@dataclass(frozen=True)
class Service:
    """Somebody's process, as a service."""

    name: str
    folder: Path
    site: bool
    port: int
    data: Path | None  # what a site reads, if it is a file or a folder

    @staticmethod
    def of(folder: Path) -> "Service":
        """The service of a federation's folder, or of a site's that has joined once."""
        folder = folder.resolve()
        _check(folder)
        if (folder / project.FILE).is_file():
            known = project.load(folder)
            return Service(known.name, folder, False, known.port, None)
        facts = health.site_facts(folder)
        if not (folder / SETTINGS).is_file():
            raise FedbilevelError(
                f"{folder} is not a site that has joined: join once with 'fedbilevel federation join'."
            )
        path = Path(str(facts.get("data", "")))
        _check(path)
        return Service(str(facts.get("name", folder.name)), folder, True, 0, path if path.is_absolute() else None)

    @property
    def unit(self) -> str:
        """The name of its unit."""
        return f"fedbilevel-{self.name.lower()}"

    @property
    def command(self) -> list[str]:
        """What runs it: arguments of ``fedbilevel federation``."""
        return ["rejoin" if self.site else "start", str(self.folder)]


def _check(path: Path) -> None:
    """Refuse paths that a service does not see, or that its files would have to quote."""
    if any(path.is_relative_to(place) for place in TEMPORARY):
        raise FedbilevelError(f"{path} is in a folder for temporary files, which a service does not see: move it.")
    if not re.fullmatch(r"[\w@+,.:/-]*", str(path)):
        raise FedbilevelError(f"the path {path} has blanks or special characters, which systemd reads in another way.")


def units(service: Service, user: str | None = None, dynamic: bool = False) -> dict[str, str]:
    """The units of systemd by the names of their files: the service, and a timer that looks at its health.

    Args:
        service: what to run.
        user: who runs it. Default: the owner of the folder.
        dynamic: let systemd make a user for it; the folder must be in /var/lib.
    """
    folder, state = service.folder, ""
    if dynamic and user is not None:
        raise FedbilevelError("give a user, or let systemd make one, but not both.")
    if dynamic:
        if not folder.is_relative_to(STATE) or folder == STATE:
            raise FedbilevelError(f"a user that systemd makes can only own folders in {STATE}: move {folder} there.")
        state, user = str(folder.relative_to(STATE)), service.unit[:31]
    owner = user or pwd.getpwuid(folder.stat().st_uid).pw_name
    if owner == "root":
        raise FedbilevelError(
            f"the service should not run as root: give --user NAME, and that user the folder {folder}; or "
            f"--dynamic-user with a folder in {STATE}."
        )
    facts = {
        "service": service, "user": owner, "state": state, "python": sys.executable,
        "command": shlex.join(service.command),
    }  # fmt: skip
    files = {".service": "service", "-health.service": "health", "-health.timer": "timer"}
    return {
        f"{service.unit}{ending}": TEMPLATES.get_template(f"{name}.jinja").render(facts)
        for ending, name in files.items()
    }


def container(service: Service) -> tuple[str, str]:
    """A Containerfile, and the command that runs its image."""
    text = TEMPLATES.get_template("container.jinja").render(service=service, version=version("fedbilevel"))
    image = service.unit
    options = [
        "--detach", "--name", image, "--restart=unless-stopped", "--read-only", "--tmpfs", "/tmp", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--volume", f"{service.folder}:{service.folder}",
    ]  # fmt: skip
    # Under the same paths as outside: the settings have them.
    if service.data is not None:
        options += ["--volume", f"{service.data}:{service.data}:ro"]
    if not service.site:
        options += ["--publish", f"{service.port}:{service.port}"]
    run = f'docker run {shlex.join(options)} --user "$(id -u):$(id -g)" {image}'
    return text, f"docker build --tag {image} --file Containerfile . && {run}"
