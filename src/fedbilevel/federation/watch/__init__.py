"""Live pages of a federation on this machine: the coordinator's, and that of a site with what the site itself sees.

``progress.py`` follows the files of a run and a site's ledger, ``coordinator.py`` and ``site.py`` make the pages of it.
They read files only, so they work whether the other processes run or not. Only the command line imports them.
"""

from pathlib import Path

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import health, project
from fedbilevel.federation.watch.coordinator import CoordinatorPage
from fedbilevel.federation.watch.live import Live
from fedbilevel.federation.watch.site import SitePage
from fedbilevel.report import watch

OFTEN = 1.0
"""Seconds between two looks at the files."""


def page_of(folder: Path) -> Live:
    """The page of a federation's folder, or of a site's."""
    if (folder / project.FILE).is_file():
        return CoordinatorPage(folder)
    if health.is_site(folder):
        return SitePage(folder)
    raise FedbilevelError(f"{folder} is neither the folder of a federation nor that of a site.")


def serve(folder: Path, port: int = 0, open_browser: bool = False) -> None:
    """Serve the live page of a folder until interrupted."""
    watch.show(page_of(folder), str(folder), port, open_browser, OFTEN)
