"""What algorithms with momenta have in common."""

from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import largest
from fedbilevel.errors import FedbilevelError


def check_forgetting(algorithm: Algorithm, names: tuple[str, ...], rate: float, power: int = 2, when: str = "") -> None:
    """Refuse momenta of which a round would keep a negative share, 1 - c rate^power.

    Args:
        algorithm: whose hyper-parameters they are.
        names: those of the forgetting rates c.
        rate: the largest value of the common rate.
        power: of the rate.
        when: when it has this value, for the message.
    """
    factor = "rate" if power == 1 else f"rate^{power}"
    for name in names:
        worst = largest(getattr(algorithm, name)) * rate**power
        if worst > 1:
            raise FedbilevelError(
                f"{type(algorithm).__name__}: {name} * {factor} must be at most 1, not {worst:.3g}{when}: "
                f"lower {name} or rate."
            )
