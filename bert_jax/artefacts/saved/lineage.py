"""Tracing of a directory's ancestors, as far as records and paths lead.

`trace` reads the ancestors in a directory's record (see `ancestors`). It then follows the paths in
the directory's configuration, to read the records of the ancestors themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_jax.artefacts.formats.huggingface_files import MAX_CONFIG_BYTES, model_class
from bert_jax.artefacts.saved.ancestors import (
    MAX_DEPTH,
    Ancestor,
    file_digest,
    known_ancestors,
    last_part,
    sources_of,
    weights_digest,
)
from bert_jax.config.mapping import build, leaves
from bert_jax.data.corpus.overlap.search import Report, reports_of
from bert_jax.data.shard import MAX_HEADER_BYTES
from bert_jax.data.store import is_store
from bert_jax.distributed.checkpoint.record import RecordFaultError, read_record
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verified_steps
from bert_jax.errors import UserError
from bert_jax.files.checks import MAX_RECORD_BYTES, RECORD_FILES
from bert_jax.files.remote import open_workdir
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.files.urls import scheme
from bert_jax.tasks.config import TaskConfig

RUNS = ("pretraining", "fine-tuning", "average")
"""Kinds of ancestors with checkpoints."""
_OTHERS = ("sweep.baseline", "distil.teacher")  # roles whose corpora do not count as the model's


def trace(place: str | Path, step: int | None = None, near: Sequence[Path] = ()) -> Ancestor:
    """Trace the ancestors of a run, an export, an import, a grown or other model, or a corpus.

    `step` selects a run's checkpoint, by default the newest verified one. Ancestors that are not at
    a recorded path are sought by name in the directories `near`. Raise a UserError if `place` is
    no such directory, or a record is malformed.
    """
    found = _look(f"{place}", step, near, ())
    if found is None:
        raise UserError(
            f"{place} has no recorded lineage; give a work directory, an output of "
            "`bert-jax export`, `import`, `grow` or `average`, a corpus, or a model in Hugging "
            "Face's format"
        )
    return found


def ancestor_entry(role: str, place: str | Path, step: int | None = None) -> dict[str, Any]:
    """Return an ancestor's entry for a descendant's record; only a name if tracing fails."""
    try:
        return trace(place, step or None).entry(role)
    except (UserError, OSError, RecursionError):
        return {"role": role, "kind": "model", "name": last_part(place)}


def _look(
    place: str, step: int | None, near: Sequence[Path], above: tuple[str, ...]
) -> Ancestor | None:
    """Identify the object at a path or URL, and its ancestors; return None for an unknown kind.

    `above` lists the places that led here. For a place that is in the list, also return None.
    """
    here = place if scheme(place) is not None else f"{Path(place).resolve()}"
    if here in above or len(above) > MAX_DEPTH:
        return None
    above = (*above, here)
    if scheme(place) is not None:
        return _run(place, step, near, above)
    path = Path(place)
    if path.is_file():
        return _here("file", place, name=path.name)
    for file, kind in RECORD_FILES.items():
        if (path / file).is_file():
            return _model(path, kind, path / file, near, above)
    for store in (path / "train", path):
        if (store / "corpus.json").is_file():
            return _corpus(path, store / "corpus.json")
    if not (path / "config.json").is_file():
        return None
    if "bert_jax" in (config := read_json_object(path / "config.json", max_bytes=MAX_CONFIG_BYTES)):
        return _run(place, step, near, above)
    return _here("model", place, digest=weights_digest(path), note=model_class(config))


def _here(kind: str, place: str, **known: Any) -> Ancestor:
    """Return the ancestor that was found at a place; `known` has its other fields."""
    return Ancestor("", kind, known.pop("name", last_part(place)), place, True, **known)


def _model(
    path: Path, kind: str, file: Path, near: Sequence[Path], above: tuple[str, ...]
) -> Ancestor:
    """Describe a directory that an export, an import or a growth made, from its record."""
    record = read_json_object(file, max_bytes=MAX_RECORD_BYTES)
    known = known_ancestors(record, file)
    told = record.get("source")
    if isinstance(told, Mapping):  # the record of an export has no path
        name, place, before = told.get("name"), "", told.get("step")
    else:
        name, before = told, None
        place = told.partition(", ")[0] if isinstance(told, str) else ""
    called = last_part(place or name) if isinstance(name, str) else "not recorded"
    before = before if type(before) is int and before else None
    source = known.pop("source", Ancestor("source", "model", called, step=before))
    look_in = tuple(dict.fromkeys((*near, path.absolute().parent)))
    parents = (_found(source, [place] if place else [], look_in, above), *known.values())
    format, made = record.get("format", ""), record.get("class", "")
    note = f"{made} as {format}" if format else f"{made}"
    return _here(kind, f"{path}", digest=weights_digest(path), note=note, parents=parents)


def _corpus(path: Path, file: Path) -> Ancestor:
    """Describe a corpus, or one store of a corpus, with the files that it was built from."""
    header = read_json_object(file, max_bytes=MAX_HEADER_BYTES)
    name = last_part(path.absolute().parent if path.name in ("train", "heldout") else path)
    tokens = header.get("num_tokens")
    return _here(
        "corpus", f"{path}", name=name, digest=f"{header.get('fingerprint', '')}",
        note=f"{tokens:,} tokens" if isinstance(tokens, int) else "",
        parents=sources_of(header, file),
    )  # fmt: skip


def _run(
    place: str, step: int | None, near: Sequence[Path], above: tuple[str, ...]
) -> Ancestor | None:
    """Describe a run or an average at one of its checkpoints."""
    work = open_workdir(place)
    file = work.local / "config.json"
    if not file.is_file():
        return None
    record = read_json_object(file, max_bytes=MAX_RECORD_BYTES)
    if step is None:
        steps = verified_steps(work.checkpoints) or saved_steps(work.checkpoints)
        step = steps[-1] if steps else None
    digest, note = "", ""
    if step is not None:
        try:
            digest = read_record(work.checkpoints / str(step)).digest
        except RecordFaultError:
            gone = step not in saved_steps(work.checkpoints)
            note = f"the checkpoint of step {step:,} is {'gone' if gone else 'damaged'}"
    kind = "fine-tuning" if record.get("kind") == "finetune" else "pretraining"
    known = known_ancestors(record, file)
    if "average" in record:
        kind, average = "average", record["average"]
        sources = average.get("sources") if isinstance(average, Mapping) else None
        each = enumerate(sources if isinstance(sources, list) else [])
        links = [_checkpoint(f"average[{number}]", source, file) for number, source in each]
    else:
        links = list(_links(record, file))
    parents = [_found(known.pop(link.role, link), [where], near, above) for link, where in links]
    found = *parents, *known.values()
    if dict(leaves(record.get("config"))).get("distil.from_teacher"):  # the teacher gave weights
        role = {"distil.teacher": "distil.from_teacher"}
        found = tuple(replace(each, role=role.get(each.role, each.role)) for each in found)
    return _here(kind, work.name, step=step, digest=digest, note=note, parents=found)


def _checkpoint(role: str, record: Any, file: Path) -> tuple[Ancestor, str]:
    """Return the checkpoint that a `branch` or `average` records, and the run's path."""
    values = record if isinstance(record, Mapping) else {}
    workdir, step, digest = (values.get(name) for name in ("workdir", "step", "digest"))
    if not (isinstance(workdir, str) and isinstance(step, int) and isinstance(digest, str)):
        raise UserError(f"{file}: {role} is {short(record)}; expected workdir, step and digest")
    return Ancestor(role, "pretraining", last_part(workdir), step=step, recorded=digest), workdir


def _links(record: Mapping[str, Any], file: Path) -> Iterator[tuple[Ancestor, str]]:
    """Yield the ancestors that a run's configuration names, each with its path."""
    if "branch" in record:
        yield _checkpoint("branch", record["branch"], file)
    config = record.get("config")
    values = dict(leaves(config))
    texts = {name: text for name, text in values.items() if isinstance(text, str) and text}
    for role in ("init", *_OTHERS):
        place = texts.get(role, "random")
        if place != "random" and not (role == "init" and "branch" in record):
            yield Ancestor(role, "model", last_part(place)), place
    if record.get("kind") == "finetune":
        section = config.get("task", {}) if isinstance(config, Mapping) else {}
        for role, place in build(TaskConfig, section, where=f"{file}: task").sources.items():
            yield Ancestor(role, "file", last_part(place)), place
        return
    phases = record.get("phase_corpora")  # no field records the fingerprints of a mixture
    digests = {"data.corpus": record.get("corpus")}
    for number, digest in (phases if isinstance(phases, Mapping) else {}).items():
        digests[f"training.phases[{number}].corpus"] = digest
    for role, corpus in texts.items():
        if role.startswith(("data.", "training.phases[")) and role.endswith(".corpus"):
            recorded = digest if isinstance(digest := digests.get(role), str) else ""
            yield Ancestor(role, "corpus", last_part(corpus), recorded=recorded), corpus


def _found(
    known: Ancestor, places: Sequence[str], near: Sequence[Path], above: tuple[str, ...]
) -> Ancestor:
    """Look for an ancestor at `places`, then in the directories `near`, by name and digest.

    The result's parents come from the ancestor's own record if the ancestor has not changed since
    the descendant read it. Otherwise they come from the descendant's record. If the descendant
    recorded no digest, an ancestor in `near` is identified only by its name.
    """
    near_by = [f"{each / known.name}" for each in near] if known.name else []
    for place in [*places, *near_by]:
        if known.kind == "corpus" and scheme(place) is not None:
            return replace(known, place=place, note="in a bucket")
        try:
            live = _look(place, known.step, near, above)
        except (UserError, OSError) as error:
            if place in places:
                return replace(known, place=place, note=f"{error}")
            continue
        if live is None:
            continue
        beside = place not in places
        if beside and live.kind == "file":
            live = replace(live, digest=file_digest(Path(place)))
        if beside and known.recorded and live.digest != known.recorded:
            continue
        same = not known.recorded or live.digest in ("", known.recorded)
        return replace(
            live,
            role=known.role,
            step=known.step or live.step,
            recorded=known.recorded,
            note="known only by its name" if beside and not known.recorded else live.note,
            parents=live.parents if same and live.parents else known.parents,
        )
    return replace(known, place=places[0] if places else "")


def reports_on_ancestors(place: str | Path) -> list[Report]:
    """Return the contamination reports on the corpora from which the model at `place` learned.

    The list omits corpora of baselines and of teachers that gave no weights, and corpora that are
    not on this machine or differ from their recorded content. Without a lineage, return [].
    """
    try:
        ancestors = list(trace(place).walk(without=_OTHERS))
    except (UserError, OSError, RecursionError):
        return []
    found: dict[tuple[str, str], Report] = {}
    for each in ancestors:
        if not (each.kind == "corpus" and each.found and each.recorded in ("", each.digest)):
            continue
        corpus = Path(each.place)
        store = corpus / "train" if is_store(corpus / "train") else corpus
        for report in reports_of(store):
            if report.fingerprint == each.digest:
                found[report.fingerprint, report.digest] = report
    return list(found.values())
