"""The live page of a site: what this site sees. It reads the site's own folder and nothing else."""

import contextlib
import shlex
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import expiry, health, logs, presence
from fedbilevel.federation.suspects import SUSPECTS, summary
from fedbilevel.federation.watch.live import TEMPLATES, Live, Tile, amount, clock, curves, validity
from fedbilevel.federation.watch.progress import LedgerProgress
from fedbilevel.federation.worker import LEDGER
from fedbilevel.report import page

DRAWN_RUNS = 6
LISTED_RUNS = 30


class SitePage(Live):
    """Everything that the people of a site should see."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, LedgerProgress(folder / LEDGER)

    def content(self) -> page.Content:
        """The page as it is now."""
        if not self.folder.is_dir():
            raise FedbilevelError(f"{self.folder} was removed.")
        facts, state = health.site_facts(self.folder), presence.state(self.folder / presence.SITE)
        name = str(facts.get("party") or facts.get("name") or self.folder.name)
        command = f"fedbilevel federation rejoin {shlex.quote(str(self.folder))}"
        problems = health.presence_problems(self.folder / presence.SITE, "this site's program", command)
        alive = not problems
        end = None
        with contextlib.suppress(OSError):
            end = expiry.of_party(expiry.of_site(self.folder), name)
        problems += health.disk(self.folder)[1] + health.certificate(end)
        if alive and state.get("problem"):
            problems.append(str(state["problem"]))
        self.ledger.update()
        above = TEMPLATES.get_template("site-above.html").render(
            name=name,
            facts=[
                f"federation {facts['federation']}" if "federation" in facts else "",
                f"server at {facts.get('host', '?')}, port {facts.get('port', '?')}",
                f"data: {facts['data']}" if "data" in facts else "",
            ],
            problems=problems,
            tiles=self._tiles(alive, state, end),
        )
        runs = sorted(self.ledger.runs.items(), key=lambda each: -each[1].last)
        below = TEMPLATES.get_template("site-below.html").render(
            suspects=SUSPECTS,
            server=f"{facts.get('host', '?')}, port {facts.get('port', '?')}",
            sent=[(run or "(no run)", known) for run, known in runs[:LISTED_RUNS]],
            older=len(runs[LISTED_RUNS:]),
            has_result={run for run, _ in runs if (self.folder / "runs" / run / "solution.safetensors").is_file()},
            found={run: summary(self.folder / "runs" / run) for run, _ in runs[:LISTED_RUNS] if run},
            refused=sorted(self.ledger.refused.values(), key=lambda each: -each.at),
            agreed=_agreed(facts.get("consent")),
            warnings=logs.warnings_of([self.folder / "site.log", self.folder / "worker.log"]),
        )
        return page.Content(f"{name}: site", above, below, self._chart())

    def _tiles(self, alive: bool, state: dict[str, Any], end: float | None) -> list[Tile]:
        known, connected = self.ledger, presence.when(state, "connected") if alive else 0.0
        since = f"since {clock(connected)}" if connected else "nothing is sent" if not alive else "trying again"
        word = "connected" if connected else "connecting" if alive else "not running"
        (left, _, unit), look = validity(end)[0].partition(" "), validity(end)[1]
        refused = sum(each.times for each in known.refused.values())
        last = f"{known.rate():.3g} per second" if known.rate() else f"{known.messages:,} in all"
        return [
            Tile("State", word, "", since),
            Tile("Sent", *amount(known.bytes_out), f"in {known.messages:,} answers to the server"),
            Tile("Received", *amount(known.bytes_in), "models and averages"),
            Tile("Last message", "none yet", "", last, at=known.last or None),
            Tile("Refused or failed", f"{refused:,}", "", "see below" if refused else "nothing"),
            Tile("Certificate", left, unit, "renew it soon" if look else "left"),
        ]

    def _chart(self) -> dict[str, Any]:
        """The site's own metrics, a line for every run."""
        runs = sorted(self.ledger.runs.items(), key=lambda each: -each[1].last)[:DRAWN_RUNS]
        lines, metrics = [], {}
        for run, known in reversed(runs):
            rows = known.rows.shown()
            own = {key: key for row in rows for key in row if key not in ("round", "seconds")}
            metrics |= own
            lines.append((run, rows, own))
        return curves(
            lines, metrics, "This site's own metrics", "Measured here, on this site's own test rows.", self.axes
        )


def _agreed(consent: Any) -> list[tuple[str, str]]:
    """What the site has agreed to, in words."""
    if not isinstance(consent, dict):
        return []
    limits = known if isinstance(known := consent.get("limits"), dict) else {}
    approved = [str(digest)[:12] for digest in known] if isinstance(known := consent.get("approved"), list) else []
    found = [("approved studies", ", ".join(approved) or "none by name")]
    if isinstance(rules := consent.get("rules"), dict):
        found += [(f"rule: {name}", _words(value)) for name, value in rules.items() if value]
    found += [(name.replace("_", " "), _words(value)) for name, value in limits.items() if value]
    return found


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
