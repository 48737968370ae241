"""Who may say what to FLARE's cells, on every channel of FLARE: a site listens to the server and to its own processes
only, and the server passes nothing on that a party says in another one's name.

FLARE itself lets every party send any request to any other, administrators' commands included.
"""

import logging
from collections.abc import Callable
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

ONLY_THE_SERVER = "only the server may call a site."
log = logging.getLogger(__name__)
Note = Callable[[str, str, int], object]
"""Notes who called, why that was refused, and how many bytes it had."""


def party(name: Any) -> str:
    """Whose cell it is: the first part of its name."""
    return FQCN.split(str(name))[0]


def strangers_refused(cell: CoreCell, note: Note) -> None:
    """Make a cell of a site refuse whoever is neither the server nor this site, before the message is looked at."""
    known = (FQCN.ROOT_SERVER, party(cell.get_fqcn()))

    def intercept(message: Message) -> Message | None:
        caller = party(message.get_header(MessageHeaderKey.ORIGIN))
        if caller in known:
            return None
        note(caller, ONLY_THE_SERVER, len(message.payload or b""))
        return make_reply(ReturnCode.UNAUTHENTICATED, error=ONLY_THE_SERVER)

    cell.set_message_interceptor(intercept)


def false_names_refused(message: Message) -> Message | None:
    """At the server: refuse a request that says to be from another party than the one whose certificate the connection
    has. FLARE compares these as long as it knows the sender's token, but not afterwards.
    """
    endpoint = message.get_prop(MessagePropKey.ENDPOINT)
    said = party(message.get_header(MessageHeaderKey.ORIGIN))
    if endpoint is None or said == party(endpoint.name):
        return None
    log.warning("refused a request of %.64r, which says to be from %.64r", endpoint.name, said)
    return make_reply(ReturnCode.UNAUTHENTICATED, error="this is not your name.")


def install_at_site(note: Note) -> None:
    """Guard every cell of this process of a site, from its first moment."""
    _guard(lambda cell: strangers_refused(cell, note))


def install_at_server() -> None:
    """Guard every cell of this process of the server."""
    _guard(lambda cell: cell.set_message_interceptor(false_names_refused))


def _guard(guard: Callable[[CoreCell], object]) -> None:
    start = CoreCell.start

    def started(self: CoreCell) -> None:
        guard(self)
        start(self)

    CoreCell.start = started
