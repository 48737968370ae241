"""What an exchange of a real federation costs, beside a bare gRPC echo of the same bytes.

    python -m benchmarks.federation

Five sites on this machine, mutual TLS, messages of 1e3, 1.6e5 and 5e6 floats in both directions: milliseconds, seconds
of processors, bytes on the server's port, threads. Then a short run of FedBiOAcc: bytes by the plan, bytes of the
messages, and how often the clients' programs were compiled.

Where the machine is busy with other things, look at the least milliseconds and at the time of processors.
"""

import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from rich.console import Console
from rich.table import Table

from benchmarks.sockets import bytes_on
from fedbilevel.engines.plan import plan
from fedbilevel.federation import coordinator, kits, process, project, setup
from fedbilevel.federation.demo import child, free_port
from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.study import Study
from fedbilevel.storage.run_folder import RunFolder

SIZES, SITES, ROUNDS = (1_000, 160_000, 5_000_000), 5, 30
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
TICKS = os.sysconf("SC_CLK_TCK")
ECHO = [sys.executable, "-m", "benchmarks.federation", "echo"]


class Watch(threading.Thread):
    """Notes what the processes of a federation use, four times a second: seconds of processors, threads, and bytes that
    went over the server's port."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.port, self.seen, self.stop = str(folder), port, list[tuple[float, ...]](), threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.25):
            found = list(processes(self.folder))
            busy, threads = sum(busy for busy, _ in found), sum(threads for _, threads in found)
            self.seen.append((time.time(), busy, bytes_on(self.port), threads))

    def between(self, began: float, ended: float) -> tuple[float, float, int, int]:
        """Seconds of processors and bytes between two times, and the threads at each."""
        times, busy, port, threads = np.array(self.seen).T
        used, sent = (np.interp([began, ended], times, each) for each in (busy, port))
        at = [int(threads[np.argmin(np.abs(times - moment))]) for moment in (began, ended)]
        return float(used[1] - used[0]), float(sent[1] - sent[0]), at[0], at[1]


def processes(words: str) -> Iterator[tuple[float, int]]:
    """Seconds of processors and threads of every process with these words in its command."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if words in (place / "cmdline").read_bytes().decode(errors="replace"):
                fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
                yield (int(fields[11]) + int(fields[12])) / TICKS, int(fields[17])


def measured(folder: Path) -> tuple[dict[str, Any], Path, Watch, dict[int, "Bare"]]:
    """Probe a real federation, and run an algorithm; bare gRPC before and after that."""
    study: dict[str, Any] = {
        "task": {"name": "quadratic", "clients": SITES, "p": 50, "d": 50},
        "algorithm": {"name": "fedbioacc"},
        "run": {"rounds": ROUNDS, "every": ROUNDS},
        "federation": {"probe": list(SIZES), "deadline": 600.0},
    }
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    port = free_port()
    described = {"name": "bench", "host": "localhost", "port": port, "experiment": "study.toml"}
    parties = [{"name": f"site{n}"} for n in range(SITES)]
    (folder / "bench.toml").write_text(tomli_w.dumps({**described, "parties": parties}))
    home = folder / "bench"
    passphrase = secrets.token_urlsafe()
    setup.create(project.read(folder / "bench.toml"), home, passphrase)
    for party in parties:
        setup.approve(home, kits.request(folder / party["name"], party["name"]), passphrase)
    children = [child(["start", str(home)], folder / "server.log")]
    watch = Watch(folder, port)
    try:
        for party in parties:
            name = party["name"]
            kit = [str(project.kit(home, name)), "--data", "builtin", "--largest-upload", "1000", "--approve"]
            children.append(child(["join", *kit, "--folder", str(folder / name)], folder / f"{name}.log"))
        while len(coordinator.state(home).get("connected", [])) < SITES:
            time.sleep(1)
        bare = {size: Bare() for size in SIZES}
        asyncio.run(_bare(home, folder, bare))
        watch.start()
        run = coordinator.want(home, folder / "study.toml", "bench")
        while (info := RunFolder(run).info()).get("status") not in ("finished", "failed"):
            time.sleep(1)
        if info["status"] == "failed":
            raise SystemExit(f"the run failed: {info['failure']}")
        asyncio.run(_bare(home, folder, bare))
    finally:
        watch.stop.set()
        process.end(*children, seconds=15.0)
    return json.loads((run / "probe.json").read_text()), run, watch, bare


class Bare:
    """Seconds of each echo, and of processors for each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.busy: list[float] = []


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


async def _bare(home: Path, folder: Path, found: dict[int, Bare]) -> None:
    """Echoes with all sites at once, of as many bytes as a message has."""
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
    sites = [subprocess.Popen([*ECHO, str(port), str(folder / f"site{n}")]) for n in range(SITES)]

    def busy() -> float:
        return time.process_time() + sum(used for used, _ in processes(f"benchmarks.federation\0echo\0{port}"))

    try:
        while len(streams) < SITES:
            await asyncio.sleep(0.05)
        for size, bare in found.items():
            message, before, spent = bytes(4 * size + 200), 0.0, 0.0
            seconds: list[float] = []
            while len(seconds) < 3 or (len(seconds) < 300 and spent < 5.0):
                began = time.perf_counter()
                for down, _ in streams:
                    await down.put(message)
                for _, up in streams:
                    await up.get()
                seconds.append(time.perf_counter() - began)
                if len(seconds) == 1:  # opens connections
                    before = busy()
                else:
                    spent += seconds[-1]
            bare.busy.append((busy() - before) / (len(seconds) - 1))
            bare.seconds += seconds[1:]
    finally:
        for site in sites:
            site.kill()
            site.wait()
        await server.stop(0)


def main() -> None:
    """Measure and print."""
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        probed, run, watch, bare = measured(folder)
        shown = ("floats", "exchanges", "ms, median", "least", "gRPC", "least", "ratio", "of least")
        table = Table(*shown, "CPU ms", "gRPC", "ratio", "bytes on port / messages", "threads")
        for size in SIZES:
            ours, theirs = probed[str(size)], bare[size]
            used, sent, before, after = watch.between(ours["began"], ours["ended"])
            count, payload = len(ours["seconds"]), 2 * ours["message"] * ours["sites"]
            rows = [(statistics.median(each), min(each)) for each in (ours["seconds"], theirs.seconds)]
            numbers = [f"{1e3 * number:.1f}" for row in rows for number in row]
            ratios = [f"{mine / other:.1f}" for mine, other in zip(*rows, strict=True)]
            cpu = (used / count, min(theirs.busy))
            busy = [f"{1e3 * cpu[0]:.1f}", f"{1e3 * cpu[1]:.1f}", f"{cpu[0] / cpu[1]:.1f}"]
            wire = f"{sent / payload / count:.3f}" if sent else "-"
            table.add_row(f"{size:,}", f"{count}", *numbers, *ratios, *busy, wire, f"{before} to {after}")
        console.print(f"{SITES} sites, mutual TLS, an exchange of so many floats in both directions.")
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
