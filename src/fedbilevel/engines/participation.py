"""Which clients take part in a round."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core import Key
from fedbilevel.errors import FedbilevelError


class Cohort(NamedTuple):
    """The clients of a round: their numbers, and how often each of these entries was drawn (None: once each). A
    compiled round has a fixed number of entries."""

    ids: jax.Array
    times: jax.Array | None = None

    @property
    def active(self) -> jax.Array | None:
        """Which entries are really taken (None: all of them)."""
        return None if self.times is None else self.times > 0

    def some(self, entries: jax.Array) -> "Cohort":
        """These entries only."""
        return Cohort(self.ids[entries], None if self.times is None else self.times[entries])


@dataclass(frozen=True)
class Everyone:
    """Full participation."""

    resample: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        pass

    def draw(self, key: Key, clients: int) -> Cohort:
        return Cohort(jnp.arange(clients))


@dataclass(frozen=True)
class Uniform:
    """A fixed number of clients per round, drawn uniformly, by default without replacement.

    A client drawn several times counts that many times and is asked once. With ``resample`` every exchange of a round
    has a new cohort.
    """

    size: int
    replacement: bool = False
    resample: bool = False

    def check(self, clients: int) -> None:
        if self.size < 1 or (self.size > clients and not self.replacement):
            raise FedbilevelError(
                f"sample: cannot draw {self.size} of {clients} clients; give a number from 1 to {clients}."
            )

    def draw(self, key: Key, clients: int) -> Cohort:
        """Robert Floyd's algorithm: the cost depends on the sample, not on the number of clients."""
        if self.replacement:
            ids = jnp.sort(jax.random.randint(key, (self.size,), 0, clients, jnp.int32))
            first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
            return Cohort(ids, jnp.where(first, jnp.sum(ids[:, None] == ids, axis=1), 0))
        keys = jax.random.split(key, self.size)

        def pick(i: jax.Array, ids: jax.Array) -> jax.Array:
            last = clients - self.size + i
            candidate = jax.random.randint(keys[i], (), 0, last + 1, ids.dtype)
            return ids.at[i].set(jnp.where(jnp.any(ids == candidate), last.astype(ids.dtype), candidate))

        ids = lax.fori_loop(0, self.size, pick, jnp.full(self.size, -1, jnp.int32))
        return Cohort(jnp.sort(ids))


@dataclass(frozen=True)
class Independent:
    """Every client takes part with this probability, independently. A round without any gets one client, drawn
    uniformly (so that, given its size, the cohort is uniform). With ``resample`` every exchange of a round has a new
    cohort."""

    probability: float
    resample: bool = False

    def check(self, clients: int) -> None:
        if not 0 < self.probability <= 1:
            raise FedbilevelError(f"sample: a probability must be above 0 and at most 1, not {self.probability}.")

    def draw(self, key: Key, clients: int) -> Cohort:
        who, alone = jax.random.split(key)
        active = jax.random.uniform(who, (clients,)) < self.probability
        active = jnp.where(active.any(), active, jnp.arange(clients) == jax.random.randint(alone, (), 0, clients))
        # Seven standard deviations of room: a larger cohort has probability below 1e-11 and would lose its last
        # members.
        expected = self.probability * clients
        room = min(clients, int(expected + 7 * (expected * (1 - self.probability)) ** 0.5) + 7)
        (ids,) = jnp.nonzero(active, size=room, fill_value=clients)
        return Cohort(ids, (ids < clients).astype(jnp.int32))


@dataclass(frozen=True)
class Fixed:
    """Always the same clients."""

    ids: tuple[int, ...]
    resample: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        if not self.ids or len(set(self.ids)) < len(self.ids) or not all(0 <= i < clients for i in self.ids):
            raise FedbilevelError(
                f"sample: a list must have distinct clients from 0 to {clients - 1}, not {list(self.ids)}."
            )

    def draw(self, key: Key, clients: int) -> Cohort:
        return Cohort(jnp.asarray(sorted(self.ids)))


def check_sample(size: int, cohort: int) -> None:
    """Refuse sub-cohorts that are larger than the cohort."""
    if not 1 <= size <= cohort:
        raise FedbilevelError(f"cannot ask {size} clients in one exchange of a round with {cohort} clients.")


Participation = Everyone | Uniform | Independent | Fixed


def participation(sample: Any, clients: int) -> Participation:
    """Read the argument ``sample``: None is all clients, a number is that many per round, a list is these clients."""
    match sample:
        case None:
            chosen: Participation = Everyone()
        case Everyone() | Uniform() | Independent() | Fixed():
            chosen = sample
        case Integral() if not isinstance(sample, bool):
            chosen = Uniform(int(sample))
        case list() | tuple() if all(isinstance(i, Integral) for i in sample):
            chosen = Fixed(tuple(int(i) for i in sample))
        case _:
            raise FedbilevelError(
                f"sample must be a number of clients, Independent(probability) or a list of clients, not {sample!r}."
            )
    chosen.check(clients)
    return chosen
