"""Parties of a federation for tests: with real keys, and an authority whose passphrase is known."""

from pathlib import Path
from unittest.mock import patch

import tomli_w

from fedbilevel.federation import authority, kits, project, setup

PASSPHRASE = "only in these tests"
STUDY = '[task]\nname = "quadratic"\n[algorithm]\nname = "fedbio"\n'


def described(folder: Path, port: int = 8102, study: str = STUDY, **parties: str) -> project.Project:
    """A federation: its parties with their roles."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "study.toml").write_text(study)
    table = {"name": "hospitals", "host": "localhost", "port": port, "experiment": "study.toml"}
    listed = [{"name": name, "role": role} for name, role in parties.items()]
    (folder / "hospitals.toml").write_text(tomli_w.dumps({**table, "parties": listed}))
    return project.read(folder / "hospitals.toml")


def created(folder: Path, port: int = 8102, study: str = STUDY, **parties: str) -> Path:
    """The folder of a new federation."""
    home = folder / "hospitals"
    with patch.object(authority, "ROUNDS", 2048):  # who waits for a key of the passphrase should be an attacker
        setup.create(described(folder, port, study, **parties), home, PASSPHRASE)
    return home


def admitted(home: Path, name: str, folder: Path, role: str = "site", new_key: bool = False) -> Path:
    """The kit for a party whose folder is another one."""
    return setup.approve(home, kits.request(folder, name, role, new_key), PASSPHRASE)
