"""Who speaks: only the server of this federation, for this site, run and job, and every message once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from fedbilevel.federation.wire.signing import UP, Forged, Party, ServersEnd, SitesEnd, trusted
from parties import HOST, Authority, only_for


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another federation of the same name."""
    return Authority(tmp_path_factory.mktemp("other"))


def ends(authority: Authority, kit: str = "north", **more: Any) -> tuple[ServersEnd, SitesEnd]:
    server = ServersEnd(Party(authority.server(), "server"), "heart", "job 1", "north")
    return server, SitesEnd(
        Party(authority.party(kit), "client"), **({"server": HOST, "site": kit, "job": "job 1"} | more)
    )


def session(authority: Authority) -> tuple[ServersEnd, SitesEnd]:
    server, site = ends(authority)
    server.accept(site.accept(server.statement_for(site.greeting())))
    return server, site


def test_messages_and_answers_carry_the_seal_of_the_session(authority: Authority) -> None:
    server, site = session(authority)
    for number, body in enumerate((b"", b"hello", bytes(1000)), start=1):
        head = server.question(body, {"seconds": 3.0})
        assert site.question(head, body) == (number, {"seconds": 3.0})
        server.check(number, site.answer(number, body[::-1]), body[::-1])
    assert site.run == "heart"


def test_an_old_or_repeated_message_is_refused(authority: Authority) -> None:
    server, site = session(authority)
    first, second = server.question(b"one", {}), server.question(b"two", {})
    site.question(second, b"two")
    for head, body in ((second, b"two"), (first, b"one")):
        with pytest.raises(Forged, match="was here before, or is older"):
            site.question(head, body)
    site.question(server.question(b"three", {}), b"three")


def test_a_flipped_bit_is_refused_wherever_it_is(authority: Authority) -> None:
    server, site = session(authority)
    body = b"the model"
    head = server.question(body, {"seconds": 3.0})
    for place in range(len(head)):
        changed = bytearray(head)
        changed[place] ^= 1
        with pytest.raises(Forged, match="does not carry the seal"):
            site.question(bytes(changed), body)
    for place in range(len(body)):
        changed = bytearray(body)
        changed[place] ^= 1
        with pytest.raises(Forged, match="does not carry the seal"):
            site.question(head, bytes(changed))
    for cut in (b"", head[:7], head[:20]):
        with pytest.raises(Forged):
            site.question(cut, body)
    assert site.question(head, body)[0] == 1  # and none of these attempts blocks the real one


def test_messages_of_another_session_are_refused(authority: Authority) -> None:
    """Of another site, another job, and of a site process that was restarted."""
    server, site = session(authority)
    other_server, _ = session(authority)
    with pytest.raises(Forged, match="does not carry the seal"):
        site.question(other_server.question(b"x", {}), b"x")
    assert site.seal is not None
    with pytest.raises(Forged, match="does not carry the seal"):  # its own answer, sent back to it
        site.question(site.seal.close(UP, 1, b"x", {}), b"x")
    head = server.question(b"x", {})
    number, _ = site.question(head, b"x")
    answer = site.answer(number, b"y")
    server.check(number, answer, b"y")
    for wrong, body in ((number, b"z"), (number + 1, b"y")):
        with pytest.raises(Forged):
            server.check(wrong, answer, body)


def test_a_session_is_for_one_site_one_run_and_one_job(authority: Authority) -> None:
    server, site = ends(authority)
    said = server.statement_for(site.greeting())
    for wrong, reason in (
        (ends(authority)[1], "another site key"),  # an old statement, for a site process that is gone
        (ends(authority, job="job 2")[1], "another job"),
        (ends(authority, "east")[1], "another site"),
    ):
        with pytest.raises(Forged, match=reason):
            wrong.accept(said)
    with pytest.raises(Forged, match="no session yet"):
        site.question(server.question(b"x", {}), b"x")
    assert site.accept(said) == site.accept(said)  # its answer may not have arrived
    again = ServersEnd(server.party, "another run", "job 1", "north").statement_for(site.greeting())
    with pytest.raises(Forged, match="has a session of this job already"):
        site.accept(again)


def test_a_changed_statement_is_refused(authority: Authority) -> None:
    server, site = ends(authority)
    said = json.loads(server.statement_for(site.greeting()))
    other = json.loads(ends(authority)[0].statement_for(site.greeting()))
    changes: list[dict[str, Any]] = [
        {"statement": other["statement"]},
        {"signature": other["signature"]},
        {"signature": "00"},
        {"signature": 3},
        {"certificate": "00"},
        {"certificate": Path(authority.party("east") / "client.crt").read_bytes().hex()},
        {"more": "00"},
    ]
    for change in changes:
        with pytest.raises(Forged):
            site.accept(json.dumps({**said, **change}).encode())
    for garbage in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000):
        with pytest.raises(Forged):
            site.accept(garbage)
        with pytest.raises(Forged):
            server.statement_for(garbage)
    for key in ("", "00", "zz", "00" * 32, 3):
        with pytest.raises(Forged):
            server.statement_for(json.dumps({"key": key}).encode())
    site.accept(json.dumps(said).encode())


def test_only_the_server_of_this_federation_can_begin_a_session(authority: Authority, other: Authority) -> None:
    """Not a site, not an administrator, not another server, not one with the same name of another authority."""
    copy = authority.folder / "a site as server"
    shutil.copytree(authority.party("east"), copy, dirs_exist_ok=True)
    for kind in ("key", "crt"):
        shutil.copy(copy / f"client.{kind}", copy / f"server.{kind}")
    wrong = {
        "that of east": copy,
        "that of other.example.org": authority.party("other.example.org", "server"),
        "lead, not of": authority.party(HOST, "server", "lead"),
        "not one of a server": authority.party(HOST, "server", extra_extensions=only_for("client")),
        "has expired": authority.party(HOST, "server", days=5),
        "not of this federation": other.server(),
    }
    for reason, place in wrong.items():
        _, site = ends(authority)
        impostor = ServersEnd(Party(place, "server"), "heart", "job 1", "north")
        with pytest.raises(Forged, match=reason):
            site.accept(impostor.statement_for(site.greeting()))
        assert site.seal is None
    mixed = authority.folder / "the server's certificate, another key"
    shutil.copytree(authority.server(), mixed, dirs_exist_ok=True)
    shutil.copy(copy / "server.key", mixed / "server.key")
    _, site = ends(authority)
    with pytest.raises(Forged, match="not signed with the key of"):
        site.accept(ServersEnd(Party(mixed, "server"), "heart", "job 1", "north").statement_for(site.greeting()))


def test_only_the_site_itself_can_answer(authority: Authority) -> None:
    server, _ = ends(authority)
    _, east = ends(authority, "east", site="north")  # east, in the place of north
    with pytest.raises(Forged, match="that of east, not of the site north"):
        server.accept(east.accept(server.statement_for(east.greeting())))
    _, north = ends(authority)
    elsewhere = ServersEnd(server.party, "heart", "job 1", "north")
    with pytest.raises(Forged, match="another session"):
        server.accept(north.accept(elsewhere.statement_for(north.greeting())))


def test_certificates_from_signing_requests_are_trusted_by_what_they_say(authority: Authority) -> None:
    """FLARE's tool writes the kind of party into them."""
    root = (authority.server() / "rootCA.pem").read_bytes()

    def certificate(place: Path, kind: str) -> bytes:
        return (place / f"{kind}.crt").read_bytes()

    serving = certificate(authority.party(HOST, "server", "server", extra_extensions=only_for("server")), "server")
    assert trusted(serving, root, "server", HOST)
    connecting = certificate(
        authority.party("north", "client", "client", extra_extensions=only_for("client")), "client"
    )
    assert trusted(connecting, root, "site", "north")
    for wrong, kind, name in ((serving, "site", HOST), (connecting, "server", "north"), (root, "server", "hospitals")):
        with pytest.raises(Forged):
            trusted(wrong, root, kind, name)
    long = "a" * 70 + ".org"
    assert trusted(certificate(authority.party(long[:64], "server"), "server"), root, "server", long)
