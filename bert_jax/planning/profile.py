"""Profiles of training steps: a trace, and the measured time of each source line."""

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import jax
from jax._src.lib import xla_client  # type: ignore[attr-defined]  # no public way to ask

from bert_jax.chips import ACCELERATORS, Chip
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.planning.hlo_cost.cost import estimate
from bert_jax.planning.hlo_cost.hlo import parse_program
from bert_jax.planning.hlo_cost.hlo_text import Module, parse_text, phase_of
from bert_jax.training.run.session import Session
from bert_jax.training.run_plan import RunPlan, Trace

_STEP, _SHOWN = "jit_train_step", 20
_PLACES = {"gpu": ("/device:GPU:", "Stream", _STEP), "tpu": ("/device:TPU:", "XLA Ops", _STEP)}
"""Names in a trace, by platform: prefixes of planes and lines, and the default HLO module."""


class Profile:
    """A `Profiler` of the steps from `first` to `last`, on the devices of process 0."""

    def __init__(self, given: str):
        """Read `FIRST:LAST`, steps counted from 1. Raise a UserError for any other text."""
        match = re.fullmatch(r"(\d+):(\d+)", given)
        self.first, self.last = map(int, match.groups()) if match else (0, 0)
        if not 2 <= self.first <= self.last:
            raise UserError(f"--profile is {given!r}; give FIRST:LAST, FIRST at least 2, as in 2:6")
        self._now, self._tracing = 0, False

    def __call__(self, plan: RunPlan) -> Trace:
        """Return a `Trace` for a run. Raise a UserError if the run is too short or untraceable."""
        self._mesh = plan.mesh
        if self.last > plan.num_steps:
            raise UserError(f"--profile ends at {self.last}; end at most at step {plan.num_steps}")
        # If JAX has loaded libtpu, to look for a TPU or for a plan, libtpu's profiler would crash.
        if jax.default_backend() != "tpu" and xla_client.pjrt_plugin_loaded("tpu"):
            raise UserError("--profile: libtpu crashes without TPU; set JAX_PLATFORMS=cpu or cuda")
        # Else a program from the cache on disk may name the lines of an older source file.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        return self._after

    def _after(self, step: int | None, session: Session, wait: Callable[[], None]) -> None:
        before, self._now = self._now, step or self._now
        if self._tracing and step in (None, self.last):
            self._tracing = False
            wait()
            with session.clock.spend("profile"):
                try:
                    lines = self._table(session)
                except Exception as error:  # of any type: training must go on
                    lines = [f"Warning: no table of the profile: {type(error).__name__}: {error}"]
            for line in lines[:_SHOWN]:
                session.out.say(line)
            session.alive("the profile")
        elif step == self.first - 1 and jax.process_index() == 0:
            self._tracing = True
            wait()
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would fill the trace
            jax.profiler.start_trace(session.work.local / "profile", profiler_options=options)
        elif not before and self._now >= self.first:
            session.out.say(
                f"Warning: --profile={self.first}:{self.last} traces nothing: this start continues "
                f"after step {self._now - 1}, and FIRST must be at least 2 steps later"
            )

    def _table(self, session: Session) -> list[str]:
        """End the trace; write and return milliseconds per step and device by source line."""
        jax.profiler.stop_trace()
        path = max(session.work.local.glob("profile/plugins/profile/*/*.xplane.pb"))
        trace, device = jax.profiler.ProfileData.from_file(str(path)), self._mesh.local_devices[0]
        loaded = (each.hlo_modules()[0] for each in device.client.live_executables())
        texts = [program.to_string() for program in loaded if program.name == _STEP]
        found = times_by_line(trace, device.platform, [parse_text(text) for text in texts])
        scale = 1e6 * (self._now + 1 - self.first) * len(self._mesh.local_devices)
        measured, told, predicted = sum(found, Counter[str]()), "TPUs only", dict[str, float]()
        if isinstance(chip := ACCELERATORS.get(device.device_kind), Chip):
            text = texts[max(range(len(texts)), key=lambda number: found[number].total())]
            torus = [1 + max(axis) for axis in zip(*(d.coords for d in jax.devices()), strict=True)]
            cost = estimate(parse_program(text, self._mesh.shape), chip, torus)
            predicted = {line: seconds * 1e3 for seconds, line in cost.by_source}
            told = f"{cost.seconds * 1e3:.2f} ms"
        name, total = f"{session.work.name}/profile", measured.total()
        table = [
            f"profile of steps {self.first} to {self._now} on {device.device_kind}: "
            f"{total / scale:.2f} ms a step in operations; bert-jax plan predicts {told}",
            f"all lines: {name}/lines.txt; trace: xprof --logdir {name}, or *.json.gz in Perfetto",
            f"        ms   share  {'predicted ms  ' if predicted else ''}source line",
        ]
        for line in sorted({**measured, **predicted}, key=lambda line: -measured[line]):
            row = f"{measured[line] / scale:10.3f}  {measured[line] / total:6.1%}  "
            table.append(row + (f"{predicted.get(line, 0.0):12.3f}  " if predicted else "") + line)
        replace_file(path.parents[3] / "lines.txt", ("\n".join(table) + "\n").encode())
        return table


def times_by_line(
    trace: jax.profiler.ProfileData, platform: str, programs: Sequence[Module]
) -> list[Counter[str]]:
    """Add up the ns of the train step's operations by source line, for each of `programs`.

    The sums are over all steps and devices. `platform` is cpu, gpu or tpu. Lines are named as in
    `Cost.by_source`; an operation that is in no program is named `(operation)`.
    """
    plane_name, line_name, unnamed = _PLACES.get(platform, ("/host:CPU", "", ""))
    runs: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
    for lines in (list(plane.lines) for plane in trace.planes if plane.name.startswith(plane_name)):
        modules = (line.events for line in lines if line.name == "XLA Modules")
        begun = sorted((event.start_ns, event.name) for events in modules for event in events)
        for event in (e for n in lines if n.name.startswith(line_name) for e in n.events):
            stats = dict(event.stats)
            running = begun[bisect(begun, (event.start_ns, "~")) - 1][1] if begun else unnamed
            # On TPU, an event is named "%fusion.1 = bf16[8,128] fusion(…".
            name = stats.get("hlo_op") or event.name.partition(" = ")[0].lstrip("%")
            # A CUDA graph runs many instructions; its kernels have the instructions' names.
            name = event.name if name.startswith("command_buffer") else name
            if (run := stats.get("hlo_module", running)).startswith(_STEP):
                runs[run, stats.get("program_id")][name] += round(event.duration_ns)
    parts = [program.computations.values() for program in programs]
    every = [[i for part in each for i in part.instructions.values()] for each in parts]
    # The name of a kernel is the name of its instruction, with underscores in place of . and -.
    kernels = [{re.sub("[.-]", "_", i.name): i for i in each} for each in every]
    named = [own | {i.name: i for i in each} for own, each in zip(kernels, every, strict=True)]
    found = [Counter[str]() for _ in programs]
    for times in runs.values():
        # Programs for other shapes have the same name, but other operations.
        number = max(range(len(named)), key=lambda n: len(times.keys() & named[n].keys()))
        for name, ns in times.items():
            if (own := named[number].get(name)) is None:
                found[number][f"({name})"] += ns
            elif own.opcode not in ("while", "conditional", "call") or platform == "gpu":
                phase, line = phase_of(own.op_name), programs[number].source(own) or "(compiler)"
                found[number][f"{line} [{phase}]" if phase else line] += ns
    return found
