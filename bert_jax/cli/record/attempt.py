"""Attempts on a track: a recipe's run for the track's time, and the line that describes the run."""

import ast
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from bert_jax.artefacts.saved.runs import read_starts, total_hours
from bert_jax.cli.record.track import Track, prepare
from bert_jax.config.command_line import find_config, load_config, overridden
from bert_jax.data.corpus.workers import worker_count
from bert_jax.errors import UserError
from bert_jax.files.checks import json_crc
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.speed import step_seconds
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.events import json_lines

LOSS = "eval/mlm_loss"
_SAME = ("corpus", "recipe", "code", "versions", "device")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def check_device(track: Track) -> str:
    """Return the name of this machine's devices. Raise a UserError if they are not the track's."""
    devices, cores = jax.devices(), worker_count(None)
    found = (devices[0].device_kind, len(devices), cores if track.cores else 0)
    if found != (track.device, track.devices, track.cores):
        raise UserError(
            f"this machine has {found[1]} x {found[0]} and {cores} cores, but the track is for "
            f"{track.devices} x {track.device}" + f" and {track.cores} cores" * bool(track.cores)
        )
    return f"{found[1]} x {found[0]}" + f", {cores} cores of {platform.machine()}" * bool(found[2])


def attempt(
    track: Track, recipe: str, texts: Path, home: Path, runs: Path, seed: int, steps: int = 0
) -> dict[str, Any]:
    """Train a recipe with a seed until the track's time is over; return the line of the record.

    The speed of a step, measured once per recipe and kept in `runs`, converts the time to a number
    of steps. With `steps`, nothing is measured. The corpus is kept in `home`. A finished run in
    `runs` with the same recipe, code, versions and device is not trained again. Raise a UserError
    if the texts or the machine are not the track's, or the recipe is wrong.
    """
    device = check_device(track)
    corpus = prepare(track, texts, home)
    path, argument = find_config(recipe)
    name = path.stem if path.stem != "recipe" else path.absolute().parent.name
    if argument:
        name += f"-{argument}"
    packages = {name: metadata.version(name) for name in _PACKAGES}
    package = Path(__file__).parents[2]  # in a clone, the shipped recipes lie beside the package
    origin = {  # what the loss depends on, so that another origin means another run
        "device": device, "versions": {"python": platform.python_version(), **packages},
        "corpus": corpus.train.fingerprint, "recipe": _code_digest("*.py", path.parent),
        "code": _code_digest("**/*.py", package, package.parent / "configs"),
    }  # fmt: skip
    run = runs / f"{name}-{json_crc(origin):08x}"
    fields = [f"--config.{field}" for field in (*track.fields(home / "corpus"), f"seed={seed}")]
    config = load_config(PretrainConfig, recipe, fields)
    told = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    if config.init or config.distil.teacher:
        raise UserError(f"{recipe} sets init or distil.teacher; a recipe of a record sets neither")
    timed = {"steps": steps, "step_seconds": None} if steps else _timed(track, config, corpus, run)
    config = overridden(config, [f"--config.training.num_steps={timed['steps']}"])
    place = run / f"seed{seed}-{timed['steps']}"
    result = train(config, place)
    if result.stopped_by:  # even after the last step: train no further seeds
        raise KeyboardInterrupt if result.stopped_by == "SIGINT" else SystemExit(143)
    if LOSS not in result.eval_metrics:
        raise UserError(
            f"{recipe}: objective.name is {config.objective.name!r}, whose evaluation has no "
            f"masked-LM loss ({LOSS}); a record needs an objective that masks words"
        )
    return {
        "name": name, "what": told.partition("\n")[0], "seed": seed, **timed,
        "loss": result.eval_metrics[LOSS],
        "nats_below_unigram": result.eval_metrics["eval/nats_below_unigram"],
        "hours": round(total_hours(read_starts(place / "goodput.json")), 4),
        "mfu": result.train_metrics.get("perf/mfu"),  # None where no peak is known, as on a CPU
        **origin,
    }  # fmt: skip


def differences(line: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Describe how two lines differ in facts on which losses depend, such as versions."""
    return [
        f"{name}: {line.get(name)} in the record, {again[name]} here"
        for name in _SAME
        if line.get(name) != again[name]
    ]


def is_recorded(line: Mapping[str, Any], record: Path) -> bool:
    """Return true if a record has a line of the same run; hours, path and loss may differ."""
    known = json_lines(record.read_bytes()) if record.exists() else ()
    names = ("track", "name", "seed", "steps", *_SAME)
    return any(all(each.get(name) == line[name] for name in names) for _, each in known)


def _timed(track: Track, config: PretrainConfig, corpus: Corpus, run: Path) -> dict[str, Any]:
    """Return `steps` that fit in the track's time, and `step_seconds`; measure them only once."""
    path = run / "speed.json"
    if not path.exists():
        seconds = step_seconds(config, corpus)
        steps = max(1, int(track.seconds / seconds))
        run.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"steps": steps, "step_seconds": seconds}).encode())
    return read_json_object(path, max_bytes=1 << 16)


def _code_digest(pattern: str, *directories: Path) -> str:
    """Return the SHA-256 digest of the names and contents of matching files in `directories`."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.glob(pattern)):
            digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
