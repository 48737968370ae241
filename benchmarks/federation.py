"""What an exchange of a real federation costs, beside a bare gRPC echo of the same bytes.

    python -m benchmarks.federation

Five sites on this machine, mutual TLS, messages of 1e3, 1.6e5 and 5e6 floats in both directions. Then a short run of
FedBiOAcc: bytes by the plan, bytes of the messages, and how often the clients' programs were compiled.
"""

import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from fedbilevel.engines.plan import plan
from fedbilevel.federation import coordinator, kits, process, project, setup
from fedbilevel.federation.demo import child, free_port
from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.study import Study
from fedbilevel.storage.run_folder import RunFolder

SIZES, SITES, ROUNDS = (1_000, 160_000, 5_000_000), 5, 30
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def federation(folder: Path) -> tuple[dict[str, Any], Path]:
    """Probe a real federation, and run an algorithm."""
    study: dict[str, Any] = {
        "task": {"name": "quadratic", "clients": SITES, "p": 50, "d": 50},
        "algorithm": {"name": "fedbioacc"},
        "run": {"rounds": ROUNDS, "every": ROUNDS},
        "federation": {"probe": list(SIZES)},
    }
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    described = {"name": "bench", "host": "localhost", "port": free_port(), "experiment": "study.toml"}
    parties = [{"name": f"site{n}"} for n in range(SITES)]
    (folder / "bench.toml").write_text(tomli_w.dumps({**described, "parties": parties}))
    home = folder / "bench"
    passphrase = secrets.token_urlsafe()
    setup.create(project.read(folder / "bench.toml"), home, passphrase)
    for party in parties:
        setup.approve(home, kits.request(folder / party["name"], party["name"]), passphrase)
    children = [child(["start", str(home)], folder / "server.log")]
    try:
        for party in parties:
            name = party["name"]
            kit = [str(project.kit(home, name)), "--data", "builtin", "--largest-upload", "1000", "--approve"]
            children.append(child(["join", *kit, "--folder", str(folder / name)], folder / f"{name}.log"))
        run = coordinator.want(home, folder / "study.toml", "bench")
        while (info := RunFolder(run).info()).get("status") not in ("finished", "failed"):
            time.sleep(1)
        if info["status"] == "failed":
            raise SystemExit(f"the run failed: {info['failure']}")
    finally:
        process.end(*children, seconds=15.0)
    return json.loads((run / "probe.json").read_text()), run


async def _echo(port: int, folder: Path) -> None:
    """A site of the bare echo: sends back what it gets."""
    import grpc

    start = folder / "startup"
    credentials = grpc.ssl_channel_credentials(
        (start / "rootCA.pem").read_bytes(), (start / "client.key").read_bytes(), (start / "client.crt").read_bytes()
    )
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, OPTIONS) as channel:
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        call = channel.stream_stream("/echo/Echo")

        async def outgoing() -> Any:
            while True:
                yield await answers.get()

        stream = call(outgoing())  # pyright: ignore[reportArgumentType]
        await answers.put(b"here")
        async for message in stream:
            await answers.put(message)


async def _bare(home: Path, folder: Path, sizes: dict[int, int]) -> dict[int, list[float]]:
    """Seconds per echo with all sites at once."""
    import grpc

    streams: list[tuple[asyncio.Queue[bytes], asyncio.Queue[bytes]]] = []

    async def handle(requests: Any, context: Any) -> Any:
        down: asyncio.Queue[bytes] = asyncio.Queue()
        up: asyncio.Queue[bytes] = asyncio.Queue()

        async def read() -> None:
            async for message in requests:
                await up.put(message)

        reader = asyncio.create_task(read())
        await up.get()
        streams.append((down, up))
        while not reader.done():
            yield await down.get()

    method = grpc.stream_stream_rpc_method_handler(handle)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Echo": method}),))
    start = home / "server" / "startup"
    pair = ((start / "server.key").read_bytes(), (start / "server.crt").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (start / "rootCA.pem").read_bytes(), require_client_auth=True)
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    command = [sys.executable, "-m", "benchmarks.federation", "echo", str(port)]
    sites = [subprocess.Popen([*command, str(folder / f"site{n}")]) for n in range(SITES)]
    try:
        while len(streams) < SITES:
            await asyncio.sleep(0.05)
        found: dict[int, list[float]] = {}
        for size, length in sizes.items():
            message, seconds = bytes(length), []
            while len(seconds) < 20 and sum(seconds) < 10.0:
                began = time.perf_counter()
                for down, _ in streams:
                    await down.put(message)
                for _, up in streams:
                    await up.get()
                seconds.append(time.perf_counter() - began)
            found[size] = seconds[1:]
        return found
    finally:
        for site in sites:
            site.kill()
            site.wait()
        await server.stop(0)


def main() -> None:
    """Measure and print."""
    console = Console()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        probed, run = federation(folder)
        bare = asyncio.run(_bare(folder / "bench", folder, {size: probed[str(size)]["message"] for size in SIZES}))
        table = Table("floats", "federation, ms", "least", "bare gRPC, ms", "least", "MB sent", "on the wire")
        for size in SIZES:
            ours, theirs = probed[str(size)], bare[size]
            payload = 2 * ours["message"] * ours["sites"]
            ms = lambda seconds: (f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * min(seconds):.1f}")
            more = f"+{ours['loopback'] / payload - 1:.0%}" if ours["loopback"] else "-"
            table.add_row(f"{size:,}", *ms(ours["seconds"]), *ms(theirs), f"{payload / 1e6:.2f}", more)
        console.print(f"{SITES} sites, mutual TLS, an exchange of so many floats in both directions; medians.")
        console.print(table)
        _bytes(run, folder, console)


def _bytes(run: Path, folder: Path, console: Console) -> None:
    """The plan against what was sent, and how often was compiled."""
    built = Study.read(run / "study.toml").build()
    expected = plan(built.task, built.algorithm)
    lines = [json.loads(line) for line in (run / EXCHANGES).read_text().splitlines()]
    rounds = [line for line in lines if line["round"] > 0]
    sent = {way: sum(line[f"bytes_{way}"] for line in rounds) / ROUNDS / SITES for way in ("down", "up")}
    planned = {way: sum(getattr(e, f"bytes_{way}") for e in expected.round) for way in ("down", "up")}
    for way in ("down", "up"):
        over = sent[way] / planned[way] - 1
        console.print(
            f"bytes {way} per site and round: {planned[way]:,} by the plan, {sent[way]:,.0f} in messages (+{over:.1%})",
            highlight=False,
        )
    traces = json.loads((folder / "site0" / "runs" / "bench" / "compiled.json").read_text())
    console.print(f"programs compiled at a site: {traces}", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        asyncio.run(_echo(int(sys.argv[2]), Path(sys.argv[3])))
    else:
        main()
