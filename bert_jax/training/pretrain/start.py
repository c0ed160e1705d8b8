"""The models that a pretraining run reads when it starts: the initial model and a teacher."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import diff
from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.heads import MASKED_LM
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import with_architecture
from bert_jax.training.start import Start, with_positions
from bert_jax.training.workdir import EMPTY, There


def resolve_start(
    config: PretrainConfig,
    read: Callable[[str], SavedModel],
    fingerprint: str | None = None,
    there: There = EMPTY,
    branches_from: PretrainConfig | None = None,
) -> tuple[PretrainConfig, Start]:
    """Read the initial model and the teacher; return the configuration with their architectures.

    Once a run has saved, the initial model is not read again: it may have been deleted. A branch
    reads no initial model; `branches_from`, the other run's configuration, gives the architecture.

    `fingerprint` identifies the corpus's tokenizer; None means no check. `there` is the content of
    the work directory. Raise a UserError if tokenizers differ, or the teacher is unsuitable.
    """
    initial, before = None, there.config(PretrainConfig) if there.steps else branches_from
    if config.init and before is not None:
        config = with_architecture(config, before.model, before.objective.network(before.model))
    elif config.init:
        initial = read(config.init)
        check_tokenizer(initial, fingerprint, "init", config.init)
        laid_out = config.objective.laid_out(initial.config, initial.params)
        initial = dataclasses.replace(initial, params=laid_out)
        config = with_architecture(config, initial.config, initial.network)
        _check_network(config, initial)
    elif before is None and getattr(config.objective, "init_decoder", False):
        raise UserError("objective.init_decoder is true, but init is empty; set init to a model")
    config, teacher = resolve_teacher(config, read, fingerprint)
    if teacher and config.distil.from_teacher and before is None:
        if initial is not None:
            raise UserError(
                f"distil.from_teacher is true, but init is {config.init!r}; a student starts from "
                "one model: leave init empty, or set distil.from_teacher to false"
            )
        initial = _student(config, teacher)
    return config, Start(initial, teacher)


def _check_network(config: PretrainConfig, initial: SavedModel) -> None:
    """Raise a UserError if the networks of the run and of `init` differ in kind or settings.

    Without this check, parameters of `init` that the run's network lacks would be left out.
    """
    ours, theirs = config.objective.network(config.model), initial.network
    if ours is None or theirs is None:
        return
    if type(ours) is not type(theirs):
        raise UserError(
            f"init: {initial.name} is a {type(theirs).__name__}, but this run trains a "
            f"{type(ours).__name__}. Set objective.name to the name of init's objective"
        )
    layers = config.model.num_layers  # 0 decoder layers means this number
    rows = [
        f"objective.{name.rpartition('.')[2]} is {mine!r} here, but {other!r} in init"
        for name, mine, other in diff(ours, theirs, ("model", "forces_end", "settings.window"))
        if not name.endswith("decoder_layers") or (mine or layers) != (other or layers)
    ]
    if rows:
        raise UserError(
            f"init: the network of {initial.name} differs from the network of this run "
            f"({'; '.join(rows)}). Set these fields of this run to the values of init"
        )


def check_tokenizer(model: SavedModel, fingerprint: str | None, where: str, directory: str) -> None:
    """Check that a model has the corpus's tokenizer. Do nothing if `fingerprint` is None.

    The error message begins with `where`, the field or option that names the model's `directory`.
    """
    there = model.tokenizer.fingerprint
    if fingerprint is not None and there != fingerprint:
        raise UserError(
            f"{where}: the tokenizer of {model.name} ({there[:12]}) is not the tokenizer of the "
            f"corpus ({fingerprint[:12]}). Build the corpus with `bert-jax corpus --tokenizer "
            f"{directory}` or, if this directory is the work directory of a run, with "
            f"`--tokenizer {directory}/tokenizer`"
        )


def resolve_teacher(
    config: PretrainConfig, read: Callable[[str], SavedModel], fingerprint: str | None = None
) -> tuple[PretrainConfig, SavedModel | None]:
    """Return the configuration with the teacher's architecture, and the teacher, if any.

    Without the `fingerprint` of the corpus's tokenizer, the teacher's tokenizer is not checked.
    Raise a UserError if the section `distil` is set without a teacher; or the teacher has another
    tokenizer than the corpus, no head to learn from, or too few positions.
    """
    config.distil.check_section()
    if not config.distil.teacher:
        return config, None
    teacher = read(config.distil.teacher)
    if (head := config.objective.TEACHER_HEAD) == MASKED_LM:
        teacher.require("fill-mask", "masked-LM head to learn from")
    elif head not in teacher.params:
        raise UserError(
            f"distil.teacher: {teacher.name} has no head {head!r}; give a model that was trained "
            f"with objective.name {config.objective.name!r}"
        )
    check_tokenizer(teacher, fingerprint, "distil.teacher", config.distil.teacher)
    longest = max(phase.length for phase in config.training.phases)
    rows = f"training.phases have rows of {longest} tokens; shorten the rows"
    model = with_positions(teacher, longest, rows)
    values = {name: getattr(model, name) for name in (*ARCHITECTURE, "vocab_size")}
    architecture = ModelConfig(**values | {"pooler": False})  # nothing reads a pooler
    params = teacher.without({"pooler"}).params
    kept = {name: params[name] for name in ("encoder", head)}
    distil = dataclasses.replace(config.distil, architecture=architecture)
    return dataclasses.replace(config, distil=distil), dataclasses.replace(teacher, params=kept)


def _student(config: PretrainConfig, teacher: SavedModel) -> SavedModel:
    """Make the initial student for `distil.from_teacher` from some of the teacher's layers.

    Raise a UserError if the architectures differ in more than layers, positions and pooler.
    """
    student, distance = config.model, config.model.relative_distance
    given = [
        f"model.{name} {getattr(student, name)!r} and {getattr(teacher.config, name)!r}"
        for name in ARCHITECTURE
        if name not in ("num_layers", "pooler", "pooler_activation")
        # Buckets of relative positions without a largest distance depend on num_positions.
        and (name != "num_positions" or (student.positions == "relative" and not distance))
        and getattr(student, name) != getattr(teacher.config, name)
    ]
    if given:
        raise UserError(
            "distil.from_teacher is true, but student and teacher differ in more than their "
            f"layers ({'; '.join(given)}). Give the student the teacher's sizes, or set "
            "distil.from_teacher to false"
        )
    chosen = np.array(config.distil.layer_map(student, teacher.config)) - 1
    encoder = dict(teacher.params["encoder"])
    encoder["layers"] = jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], encoder["layers"])
    if "position" in encoder["embeddings"]:
        rows = np.asarray(encoder["embeddings"]["position"])[: student.num_positions]
        encoder["embeddings"] = {**encoder["embeddings"], "position": rows}
    return dataclasses.replace(
        teacher,
        config=dataclasses.replace(teacher.config, num_layers=student.num_layers),
        params={**teacher.params, "encoder": encoder},
        name=f"layers {', '.join(str(n + 1) for n in chosen)} of {teacher.name}",
    )
