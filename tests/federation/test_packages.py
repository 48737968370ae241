"""Plug-ins in a federation: a site runs only packages that it listed, as they were when it did."""

from pathlib import Path

import pytest

import fedbilevel as fb
import lab
from fedbilevel.federation.cli.site import _packages
from fedbilevel.federation.consent import Consent, digest
from fedbilevel.federation.study import Study, facts_of_packages, packages_differ
from fedbilevel.runs import plugins

HOLE = '[task]\nname = "regularization"\ndata = "test_packages:spy"\nlabel = "a"\n'
CALLED: list[str] = []


def spy() -> dict[str, list[int]]:
    """What a study must not be able to call."""
    CALLED.append("called")
    return {"a": [1]}


def asked(word: str) -> str:
    return f'[task]\nname = "quadratic"\n[algorithm]\nname = "{word}"\n'


def test_only_listed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.package(tmp_path, "lab_f", monkeypatch)
    trap = tmp_path / "imported"
    (folder / "__init__.py").write_text(f"import pathlib\n\npathlib.Path({str(trap)!r}).touch()\n")
    for word in ("lab_f.methods:Mine", "lab_f-mine"):
        text = asked(word)
        with pytest.raises(fb.FedbilevelError, match="this site does not list the package 'lab_f'"):
            Study.of(text)
        with pytest.raises(fb.FedbilevelError, match="join with --plugin lab_f"):
            Consent((digest(text),)).check(text, 3)
    with pytest.raises(fb.FedbilevelError, match="is a file: a federation runs installed packages only"):
        Study.of(asked("./mine.py:Mine"), packages={"mine": "0"})
    assert not trap.exists()  # to refuse, nothing is imported

    packages = {"lab_f": plugins.hash_of(folder)}
    text = asked("lab_f-mine")
    consent = Consent.of(Consent((digest(text),), packages=packages).plain())
    study = consent.check(text, 3)
    assert study.packages == ("lab_f",)
    assert type(study.build().algorithm).__name__ == "Mine"
    there = facts_of_packages(study.packages)
    assert packages_differ(facts_of_packages(study.packages), there) == ""
    (folder / "methods.py").write_text(lab.METHOD + "\n")
    with pytest.raises(fb.FedbilevelError, match="'lab_f' is not the one that this site listed"):
        consent.check(text, 3)
    assert "package lab_f differs from the server's" in packages_differ(facts_of_packages(study.packages), there)
    plugins._entries.cache_clear()


def test_a_site_lists_packages_by_name_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = plugins.hash_of(lab.package(tmp_path, "lab_g", monkeypatch))
    assert _packages([f"lab_g={known[:12]}"]) == {"lab_g": known}
    with pytest.raises(fb.FedbilevelError, match="here has the hash"):
        _packages(["lab_g=000000000000"])
    with pytest.raises(fb.FedbilevelError, match="no package called 'lab_none' here"):
        _packages(["lab_none"])
    plugins._entries.cache_clear()


def test_a_study_cannot_name_what_a_site_reads_or_calls() -> None:
    with pytest.raises(fb.FedbilevelError, match="cannot say which table to read: every site does"):
        Study.of(HOLE)
    assert not CALLED
