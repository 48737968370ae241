"""Sites and servers that run for weeks: units, the file for containers, logs that stay small, signs of life."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedbilevel as fb

pytest.importorskip("nvflare")

from fedbilevel.federation import logs, presence, process, project, service
from fedbilevel.federation.coordinator import Coordinator
from fedbilevel.federation.worker import SETTINGS


def federation(port: int = 8102) -> service.Service:
    return service.Service("hospitals", Path("/var/lib/fedbilevel/hospitals"), False, port, None)


def site() -> service.Service:
    folder, data = Path("/srv/federation/cleveland"), Path("/srv/data/patients.csv")
    return service.Service("cleveland", folder, True, 0, data)


def parsed(text: str) -> dict[str, dict[str, list[str]]]:
    """A unit: its sections, keys and values."""
    unit: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            unit.setdefault(section, {}).setdefault(key, []).append(value)
    return unit


def test_units_run_the_command_and_may_little() -> None:
    files = service.units(site(), "fedbilevel")
    assert list(files) == [f"fedbilevel-cleveland{end}" for end in (".service", "-health.service", "-health.timer")]
    unit = parsed(files["fedbilevel-cleveland.service"])["[Service]"]
    (command,) = unit["ExecStart"]
    assert shlex.split(command)[1:] == ["-m", "fedbilevel", "federation", "rejoin", "/srv/federation/cleveland"]
    wanted = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "PrivateTmp": "yes", "Restart": "always",
        "ReadWritePaths": "/srv/federation/cleveland", "User": "fedbilevel", "CapabilityBoundingSet": "",
        "Type": "notify", "UMask": "0077",
    }  # fmt: skip
    assert {key: unit[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    health = parsed(files["fedbilevel-cleveland-health.service"])["[Service]"]
    assert health["ExecStart"][0].endswith("fedbilevel federation health /srv/federation/cleveland")
    assert health["User"] == unit["User"]


def test_systemd_may_make_the_user() -> None:
    files = service.units(federation(), dynamic=True)
    for name in ("fedbilevel-hospitals.service", "fedbilevel-hospitals-health.service"):
        unit = parsed(files[name])["[Service]"]
        # The same name: otherwise each unit would take the folder away from the other.
        assert (unit["DynamicUser"], unit["User"]) == (["yes"], ["fedbilevel-hospitals"])
        assert unit["StateDirectory"] == ["fedbilevel/hospitals"]
        assert "ReadWritePaths" not in unit
    assert "AmbientCapabilities" not in files["fedbilevel-hospitals.service"]
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE" in next(
        iter(service.units(federation(443), dynamic=True).values())
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name, text in {**service.units(site(), "daemon"), **service.units(federation(), dynamic=True)}.items():
        (tmp_path / name).write_text(text)
    paths = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = tmp_path / "wrong.service"
    wrong.write_text((tmp_path / "fedbilevel-cleveland.service").read_text().replace("PrivateTmp", "PrivatTmp"))
    done = subprocess.run(["systemd-analyze", "verify", str(wrong)], capture_output=True, text=True, check=False)
    assert "PrivatTmp" in done.stderr  # it does read them


@pytest.mark.parametrize(
    ("given", "user", "dynamic", "said"),
    [
        (site(), "root", False, "should not run as root"),
        (site(), None, True, "can only own folders in /var/lib"),
        (federation(), "anna", True, "but not both"),
    ],
)
def test_services_that_would_be_unsafe_are_refused(
    given: service.Service, user: str | None, dynamic: bool, said: str
) -> None:
    with pytest.raises(fb.FedbilevelError, match=said):
        service.units(given, user, dynamic)


def test_folders_that_a_service_does_not_see_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TEMPORARY", (tmp_path / "tmp",))
    for name in ("tmp/site", "a b", "c%d", 'e"f', "good"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / SETTINGS).write_text(json.dumps({"name": "cleveland", "data": str(folder / "patients.csv")}))
        if name == "good":
            assert service.Service.of(folder).data == folder / "patients.csv"
            continue
        with pytest.raises(fb.FedbilevelError, match=r"move it|special characters"):
            service.Service.of(folder)
    (tmp_path / "good" / SETTINGS).unlink()
    with pytest.raises(fb.FedbilevelError, match="is not a site that has joined"):
        service.Service.of(tmp_path / "good")


@pytest.mark.parametrize("given", [site(), federation()], ids=["site", "coordinator"])
def test_the_file_for_containers_has_what_it_needs(given: service.Service) -> None:
    text, run = service.container(given)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = [(line.split()[0], line.split(None, 1)[1]) for line in lines]
    assert steps[0][0] == "FROM"
    known = {
        "FROM",
        "RUN",
        "ENV",
        "USER",
        "WORKDIR",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in steps} <= known
    last = dict(steps)
    assert last["USER"] == "10001:10001"
    start = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert start == ["fedbilevel", "federation", "rejoin" if given.site else "start", str(given.folder)]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert check == ["fedbilevel", "federation", "health", str(given.folder)]
    assert json.loads(last["VOLUME"]) == [str(given.folder)]
    words = shlex.split(run.partition(" && ")[2])
    for option in ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user"):
        assert option in words
    assert f"{given.folder}:{given.folder}" in words
    assert (f"{given.data}:{given.data}:ro" in words) == given.site
    assert ("8102:8102" in words) == (not given.site)


def test_logs_stay_small_while_their_writers_keep_them_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process writes lines to a log that is rotated all the time: few are lost, and the order stays."""
    log = tmp_path / "site.log"
    module = tmp_path / "talks.py"
    module.write_text("import sys\nfor n in range(40_000):\n    print(f'line {n:06d}', flush=n % 50 == 0)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    child = process.start("talks", [], log)
    most = 0
    while child.poll() is None:
        logs.rotate([log], largest=50_000, kept=3)
        most = max(most, sum(path.stat().st_size for path in tmp_path.glob("site.log*")))
        time.sleep(0.001)
    process.end(child)
    logs.rotate([log], largest=50_000, kept=3)
    files = sorted(path.name for path in tmp_path.glob("site.log*"))
    assert files == ["site.log", "site.log.1", "site.log.2", "site.log.3"]
    assert most < 40_000 * 12  # not all of it was ever there
    kept = "".join((tmp_path / name).read_text() for name in ["site.log.3", "site.log.2", "site.log.1", "site.log"])
    numbers = [int(number) for number in re.findall(r"^line (\d{6})$", kept, re.MULTILINE)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 39_999
    assert len(numbers) > 0.95 * (numbers[-1] - numbers[0] + 1)


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("a line\n")
    logs.rotate([log, tmp_path / "missing.log"])
    assert [path.name for path in tmp_path.iterdir()] == ["worker.log"]


def test_systemd_hears_that_the_coordinator_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "h"
    home.mkdir()
    project.save(project.Project("hospitals", "localhost", 8102, {"a": "site"}, "", ()), home)
    serving = Coordinator(home, lambda text: None)
    serving.server = SimpleNamespace(pid=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        serving._note()  # nobody listens: nothing is sent
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        (home / "server.log").write_bytes(b"x" * (logs.LARGEST + 1))
        serving._note()
        assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
        for _ in range(1000):  # more than its queue holds, while it does not listen
            service.alive()
    assert (home / "server.log").stat().st_size == 0  # it is rotated on the way
    state = presence.state(home / presence.COORDINATOR)
    assert (state["pid"], state["connected"]) == (os.getpid(), [])
    serving._note()  # the manager is gone: that is no error
