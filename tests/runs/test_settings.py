"""Settings by name: whose they are, and what is refused."""

from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.runs.settings import Setting, Settings

OWNERS = {"task": ("quadratic", ["clients", "seed"]), "algorithm": ("fedbio", ["lr_upper", "seed"])}


@pytest.mark.parametrize("key", ["lr_upper", "task.clients", "algorithm.lr_upper", "run.rounds", "fedbio.lr_upper"])
def test_a_key_survives_being_taken_apart(key: str) -> None:
    assert Setting.parse(key).key == key


def test_a_bare_name_is_for_everybody() -> None:
    assert all(Setting.parse("lr_upper").is_for(table) for table in ("task", "algorithm"))
    assert not Setting.parse("task.clients").is_for("algorithm")


def test_the_last_word_counts_however_it_is_written() -> None:
    settings = Settings({"lr_upper": 1, "task.clients": 3})
    settings.put("algorithm.lr_upper", 2)
    assert settings == {"task.clients": 3, "algorithm.lr_upper": 2}
    settings.put("lr_upper", 3)
    settings.put("task.clients", 4)
    assert settings == {"lr_upper": 3, "task.clients": 4}


def test_values_are_what_their_defaults_are() -> None:
    settings = Settings({"clients": "7", "task.noise": "0.5", "algorithm.steps": "2"})
    assert settings.values_for("task", {"clients": 1, "noise": 0.0}, {}) == {"clients": 7, "noise": 0.5}
    assert settings.values_for("algorithm", {"steps": 1.0}, {}) == {"steps": 2.0}
    with pytest.raises(fb.FedbilevelError, match=r"^my.toml, line 3: clients must be a whole number, not '7.5'\.$"):
        Settings(clients="7.5").values_for("task", {"clients": 1}, {"clients": "my.toml, line 3: "})


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("lr_uper", "there is no setting of quadratic or fedbio called 'lr_uper': did you mean 'lr_upper'?"),
        ("rouns", "there is no setting of quadratic or fedbio called 'rouns': did you mean 'rounds'?"),
        ("task.client", "there is no setting of quadratic called 'client': did you mean 'clients'?"),
        ("algorithm.clients", "there is no setting of fedbio called 'clients': known: lr_upper, seed."),
        ("seed", "'seed' is an option of both quadratic and fedbio: write task.seed or algorithm.seed."),
    ],
)
def test_what_nobody_has_or_two_have_is_refused(key: str, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        Settings({key: "1"}).check(OWNERS, ["rounds"], {})
    assert str(caught.value) == sentence


@pytest.mark.parametrize("key", ["clients", "task.seed", "algorithm.seed", "algorithm.lr_upper"])
def test_what_one_has_is_not(key: str) -> None:
    settings: dict[str, Any] = {key: "1"}
    Settings(settings).check(OWNERS, ["rounds"], {})
