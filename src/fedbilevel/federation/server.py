"""The server's side of a run: what FLARE's job process runs on the server.

A run has a folder, ``runs/NAME`` in the folder of the federation, with the same contents as those of the simulator. It
gets a checkpoint after every round; if this job ends for any reason, the next job continues from there.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.wire.sites import FEDERATION_FOLDER, Sites

STUDY = "study.toml"


class Server:
    """Runs a study to its end.

    Args:
        run: the name of its folder.
        sites: who takes part, in the order of their numbers; some may be offline.
    """

    def __init__(self, run: str, sites: list[str]) -> None:
        from fedbilevel.federation.site import end_with_parent

        self.folder, self.sites = Path(os.environ[FEDERATION_FOLDER]) / "runs" / run, sites
        for name in ("nvflare.collab", "Group", "CellDispatcher"):  # a line for every call is no help
            logging.getLogger(name).setLevel(logging.WARNING)
        end_with_parent()

    @collab.main
    def main(self) -> None:
        """Run the study; errors are saved for the coordinator."""
        from fedbilevel.errors import FedbilevelError, NoQuorum
        from fedbilevel.storage import compiled
        from fedbilevel.storage.run_folder import RunFolder

        compiled.enable()
        try:
            _compute(self.folder, self.sites)
        except NoQuorum as error:  # parties may come back
            RunFolder(self.folder).enter("waiting", failure=str(error))
            raise
        except OSError as error:  # a full disk, a folder that became read-only: it goes on when it can
            with contextlib.suppress(OSError):
                said = (
                    f"the server cannot write its state ({error.strerror or error}): free space, or make it writable."
                )
                RunFolder(self.folder).enter("waiting", failure=said)
            raise
        except Exception as error:
            if isinstance(error, FedbilevelError) or not collab.is_aborted:
                RunFolder(self.folder).fail(error)
            raise


def _compute(folder: Path, sites: list[str]) -> None:
    import numpy as np

    from fedbilevel.engines.messaging.post import Post
    from fedbilevel.engines.messaging.protocol import Failed, Hello, Message, Prepare
    from fedbilevel.engines.participation import participation
    from fedbilevel.engines.plan import trace
    from fedbilevel.engines.program import Program
    from fedbilevel.errors import FedbilevelError, NoQuorum
    from fedbilevel.federation import suspects
    from fedbilevel.federation.engine import Federation, metrics_of
    from fedbilevel.federation.ledger import Ledger, owner
    from fedbilevel.federation.schema import blank
    from fedbilevel.federation.study import (
        Study,
        facts_of_copy,
        facts_of_packages,
        plan_digest,
        server_task,
        site_weights,
        sums,
    )
    from fedbilevel.runs import configuration
    from fedbilevel.runs.execute import describe
    from fedbilevel.runs.settings import plain
    from fedbilevel.runs.solve import solve
    from fedbilevel.runs.until import parse as parse_until
    from fedbilevel.storage.arrays import decode, encode
    from fedbilevel.storage.files import write_atomically
    from fedbilevel.storage.run_folder import RunFolder

    study, place = Study.read(folder / STUDY), RunFolder(folder)
    own, here = study.schema is not None, {**facts_of_copy(), **facts_of_packages(study.packages)}
    transport = Sites.of_job(folder.name, sites, study.rules.deadline, study.rules.setup_deadline)
    finished = place.info().get("status") == "finished"  # then only to give sites the result that were not there
    quorum = 1 if finished else study.quorum(len(sites))
    post = Post(transport)

    def setup(
        questions: Mapping[int, Message], arrays: Mapping[str, Any], check: Callable[[Any, Any], object]
    ) -> dict[int, tuple[Any, Any]]:
        """Ask sites, and drop those whose answer is not valid. Too few of them are an error: for now if some gave no
        answer at all, as these may come back; for good if all others refused, as they will refuse again.
        """
        most = sum(np.asarray(array).nbytes for array in shapes.values())
        answers = post.ask({m: (question, arrays) for m, question in questions.items()}, most)
        agreed, refused = {}, {}
        known = place.info()
        for m, (answer, reply) in answers.items():
            try:
                if isinstance(answer, Failed):
                    raise FedbilevelError(answer.error)
                try:
                    check(answer, reply)
                except (FedbilevelError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    raise FedbilevelError(f"its answer does not fit: {error}") from error
                agreed[m] = (answer, reply)
            except FedbilevelError as error:
                refused[sites[m]] = str(error)
                transport.there.discard(sites[m])
        if refused:
            unable = {*known.get("unable", ()), *(sites[m] for m in post.absent)}
            place.note(refused={**known.get("refused", {}), **refused}, unable=sorted(unable))
        if len(agreed) < quorum:
            said = "; ".join(f"{name}: {reason.removesuffix('.')}" for name, reason in refused.items())
            kind = NoQuorum if len(agreed) + len(post.absent) >= quorum else FedbilevelError
            raise kind(f"too few parties can take part. {said}.")
        return agreed

    place.enter("setting up", sites=sites, there=sorted(transport.there))
    place.note(refused={}, unable=[])
    shapes = study.summarize(blank(study.schema)) if study.schema is not None else {}
    everybody = dict.fromkeys(range(len(sites)), Hello(folder.name, study.text, here, len(sites)))
    answers = setup(everybody, {}, lambda answer, reply: study.check_facts(answer.rows, reply))
    # Sums and weights are fixed by the first job of a run: sites that come later, or are offline later, do not change
    # them.
    facts_file = folder / "facts.safetensors"
    rows = np.zeros(len(sites), int)
    if facts_file.exists():
        try:
            known, facts = decode(facts_file.read_bytes())
        except FedbilevelError as error:
            raise FedbilevelError(f"{facts_file} cannot be used: {error} Restore it from a backup.") from error
        rows[:] = known["rows"]
        if known["copy"] != here:
            then = f"fedbilevel {known['copy']['version']}, jax {known['copy']['jax']}, {known['copy']['numbers']}"
            raise FedbilevelError(f"this run was started with {then}: install these versions, or start a new run.")
    else:
        first = np.array([answer.rows for answer, _ in answers.values()])
        of_sites = [reply for _, reply in answers.values()]
        facts = sums(of_sites, first, study.rules) if own else {}
        for m, (answer, _) in answers.items():
            rows[m] = answer.rows
        write_atomically(facts_file, encode({"rows": rows.tolist(), "copy": here}, facts))
    built = study.build(facts=facts, clients=len(sites))
    task = server_task(built, len(sites), own)
    weights = site_weights(rows, study.rules) if own else task.normalised_weights
    chosen = participation(built.experiment.participation(), len(sites))
    program = Program.checked(task.problem, built.algorithm, task.layout, chosen)
    plan = trace(program, task.data)
    digest = plan_digest(plan, built)
    prepare = {m: Prepare(m, float(weights[m]), len(sites)) for m in answers}
    answers = setup(prepare, facts, lambda answer, _: answer.plan)
    for m, (answer, _) in answers.items():
        if answer.plan != digest:
            raise FedbilevelError(f"{sites[m]} plans other exchanges than the server: install the same versions.")

    if study.rules.probe:
        write_atomically(folder / "probe.json", json.dumps(_probe(transport, study.rules.probe)).encode())
    log = Ledger(folder / EXCHANGES, owner(folder.parent.parent, folder.name))
    with place.records() as records:
        engine = Federation(
            program,
            plan,
            weights,
            transport,
            task.data,
            1 if finished else study.rules.quorum,
            folder.name,
            sites,
            lambda served: log.note({**served._asdict(), "traffic": traffic()}),
        )
        traffic = lambda: {sites[m]: both for m, both in engine.post.traffic.items()}
        engine.task = None if own else task
        engine.metric_names = metrics_of(task) if own else frozenset()
        before = place.info()
        engine.post.bytes_down, engine.post.bytes_up = before.get("bytes_down", 0), before.get("bytes_up", 0)
        earlier = before.get("traffic", {})
        engine.post.traffic = {
            m: (earlier[name][0], earlier[name][1]) for m, name in enumerate(sites) if name in earlier
        }
        config = built.config()
        run = {name: config["run"][name] for name in ("rounds", "seed", "sample", "every")}
        config["run"] = {**run, "engine": "federation"}
        config["federation"] = {name: plain(value) for name, value in asdict(study.rules).items()}
        place.write_config(configuration.write(config))
        described = describe(built, folder)
        place.enter("running", **{**described, "clients": len(sites), "rules": asdict(study.rules), "failure": ""})
        experiment = built.experiment

        def on_row(row: dict[str, Any]) -> None:
            records.append({"run": described.get("main"), **row})
            down, up = engine.post.bytes_down, engine.post.bytes_up
            place.note(round=row["round"], seen=time.time(), bytes_down=down, bytes_up=up, traffic=traffic())

        result = solve(
            task,
            built.algorithm,
            experiment.rounds or 1,
            experiment.seed,
            chosen,
            every=experiment.every,
            until=parse_until(experiment.until),
            engine=engine,
            callbacks=[on_row],
            checkpoint=place.checkpoints(seconds=0),
        )
        waiting, counts = place.info().get("undelivered", sites), place.info().get("suspects", {})
        schema = study.schema if study.finds_suspects else None
        late = engine.finish(result.state, 0 if schema is None else suspects.BYTES * len(schema.classes))
        if schema is not None:
            size = dict(zip(sites, rows.tolist(), strict=True))
            told = {m: suspects.received(arrays, schema, size[m]) for m, arrays in engine.finished.items()}
            place.note(suspects={**counts, **{name: numbers for name, numbers in told.items() if numbers}})
        place.note(undelivered=sorted(set(waiting) & late.keys()))
    if finished:
        return
    place.save_solution(result.x, result.y, int(result.state.round))
    last = {k: v for k, v in result.metrics.items() if k != "round"}
    summary = {**last, "rounds": result.metrics["round"], "seconds": result.seconds}
    summary |= {"bytes_down": engine.post.bytes_down, "bytes_up": engine.post.bytes_up}
    place.finish(summary)


def _probe(transport: Sites, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure how long an exchange of these numbers of floats in both directions takes, with all sites at once."""
    import numpy as np

    from fedbilevel.engines.messaging.protocol import Echo, pack

    found = {}
    for size in sizes:
        message = pack(Echo(), {"floats": np.random.default_rng(0).normal(size=size).astype(np.float32)})
        asked = dict.fromkeys(range(len(transport.sites)), message)
        transport.ask(asked, "echo")  # opens connections
        seconds: list[float] = []
        most, limit = (1000, 60.0) if size <= 10_000 else (200, 10.0)
        start = time.time()
        while len(seconds) < most and (sum(seconds) < limit or len(seconds) < 3):
            began = time.perf_counter()
            answers = transport.ask(asked, "echo")
            seconds.append(time.perf_counter() - began)
            if not all(isinstance(answer, bytes) for answer in answers.values()):
                break
        place = {"message": len(message), "sites": len(asked), "began": start, "ended": time.time()}
        found[str(size)] = {"seconds": seconds, **place}
    return found
