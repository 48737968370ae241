"""The verdict follows from the claims about the paper's own method."""

from dataclasses import replace

from fedbilevel.reproduction import Reproduced, headline, judged, verdict
from fedbilevel.reproduction.curves import Curve
from fedbilevel.reproduction.files import Claim, Method
from made_up import flat, reproduced

TRUE = Claim("it is so", "bound", ["one"], least=0.0)
FALSE = Claim("it is not", "bound", ["one"], most=0.0)
OPEN = Claim("it may be", "bound", ["one"], least=1.05)


def with_claims(*claims: Claim) -> Reproduced:
    return reproduced({"one": [1.0, 1.1]}, claims=claims)


def with_found(end: float, *claims: Claim) -> Reproduced:
    """The same method with parameters that were found, too."""
    done = with_claims(*claims)
    made = done.reproduction
    found = Method("one", "fedbio", "found")
    curves = [Curve(made.panels[0], found, seed, flat(end + 0.1 * seed)) for seed in (0, 1)]
    return Reproduced(replace(made, methods=[*made.methods, found]), [*done.curves, *curves])


def test_there_are_four_verdicts_and_undecided() -> None:
    assert verdict(with_claims(TRUE)) == "reproduced"
    assert verdict(with_claims(TRUE, FALSE)) == "partly reproduced (1 of 2 hold; parameters: the paper's)"
    assert verdict(with_claims(TRUE, OPEN)) == "partly reproduced (1 of 2 hold, 1 undecided; parameters: the paper's)"
    assert verdict(with_claims(FALSE, OPEN)) == "not reproduced (0 of 2 hold, 1 undecided)"
    assert verdict(with_claims(OPEN)) == "undecided (0 of 1 hold, 1 undecided)"
    assert verdict(with_found(-5.0, TRUE)) == "reproduced"
    assert verdict(with_found(-5.0, FALSE)) == "reproduced with other parameters (found by search)"
    assert verdict(with_found(-5.0, TRUE, FALSE)) == "partly reproduced (1 of 2 hold; parameters: the paper's)"
    two = replace(FALSE, words="another")
    assert verdict(with_found(-5.0, TRUE, FALSE, two)).endswith("(2 of 3 hold; parameters: found by search)")
    assert set(judged(with_found(1.0, TRUE))) == {"printed", "found"}


def test_baselines_and_questions_of_ours_decide_nothing() -> None:
    done = with_claims(TRUE, replace(FALSE, about="baselines"), replace(OPEN, about="ours"))
    assert verdict(done) == "reproduced"
    assert headline(done)["Baselines, judged apart"] == "0 of 1 hold (parameters: the paper's)."
    assert verdict(with_claims(FALSE, replace(TRUE, about="baselines"))) == "not reproduced (0 of 1 hold)"


def test_a_smoke_run_has_no_verdict() -> None:
    done = with_claims(TRUE)
    assert "smoke" in verdict(replace(done, reproduction=replace(done.reproduction, smoke=True)))


def test_the_headline_says_first_what_holds() -> None:
    lines = headline(with_claims(FALSE, OPEN, TRUE))
    assert lines == {"Holds": "it is so.", "Undecided": "it may be.", "Does not hold": "it is not."}
    assert next(iter(lines)) == "Holds"
    other = headline(with_found(-5.0, TRUE, FALSE))
    assert other["With parameters: found by search"] == "1 of 2 hold."
    mixed = reproduced({"one": [1.0, 1.1]}, {"one": [-1.0, -1.1]}, claims=[TRUE])
    assert headline(mixed) == {"Holds": "it is so (A).", "Does not hold": "it is so (B)."}
    assert verdict(mixed) == "partly reproduced (1 of 2 hold; parameters: the paper's)"
