"""The teacher of a pretraining run: read at each start, never saved with the run."""

import dataclasses
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.distributed.checkpoint import saved_steps
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.heads import logical_axes
from bert_jax.objectives.distillation import TEACHER
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.start.initial_model import check_tokenizer, initial_params
from bert_jax.training.steps.state import TrainState


def resolve_teacher(
    config: PretrainConfig, tokenizer_fingerprint: str | None = None
) -> tuple[PretrainConfig, SavedModel | None]:
    """Return the configuration with the architecture of the teacher, and the teacher, if any.

    Without the fingerprint of the corpus's tokenizer, the teacher's tokenizer is not checked.

    Raises:
        UserError: The section is set without a teacher, or the teacher has another tokenizer than
            the corpus, no masked-LM head, or too few positions.
    """
    config.distil.check_section()
    if not config.distil.teacher:
        return config, None
    teacher = read_model(config.distil.teacher)
    teacher.require("fill-mask", "masked-LM head to learn from")
    if tokenizer_fingerprint is not None:
        check_tokenizer(teacher, tokenizer_fingerprint, "distil.teacher", config.distil.teacher)
    values = {name: getattr(teacher.config, name) for name in (*ARCHITECTURE, "vocab_size")}
    values["pooler"] = False  # nothing reads it
    longest = max(phase.length for phase in config.training.phases)
    if longest > values["num_positions"]:
        if values["positions"] != "rope":
            raise UserError(
                f"distil.teacher: {teacher.name} has {values['num_positions']} positions, and "
                f"training.phases have rows of {longest} tokens; shorten the rows"
            )
        values["num_positions"] = longest
    architecture = ModelConfig(**values)
    kept = {
        name: {n: part for n, part in teacher.params[name].items() if n in parts}
        for name, parts in logical_axes(architecture).items()
    }
    distil = dataclasses.replace(config.distil, architecture=architecture)
    return dataclasses.replace(config, distil=distil), dataclasses.replace(teacher, params=kept)


def teacher_line(teacher: SavedModel) -> str:
    """Name the teacher and its size."""
    model, count = teacher.config, sum(leaf.size for leaf in jax.tree.leaves(teacher.params))
    return (
        f"learns from {teacher.name}: {count:,} parameters, {model.num_layers} layers, "
        f"{model.hidden_dim} wide; no checkpoint holds them"
    )


def without_teacher(state: TrainState) -> TrainState:
    """Return the part of a state to save: everything but the teacher."""
    kept = {name: entry for name, entry in state.params.items() if name != TEACHER}
    return state._replace(params=kept)


def with_teacher(
    teacher: SavedModel | None, state: TrainState, abstract: TrainState, axes: Any
) -> TrainState:
    """Put the parameters of the teacher into a state on a mesh.

    Args:
        teacher: Teacher from `resolve_teacher`; None: the state stays as it is.
        state: State with or without an entry `teacher`.
        abstract: Shape, type and sharding of each array of the state.
        axes: Logical axes of each parameter.

    Raises:
        UserError: Parameters that the architecture names are missing.
    """
    if teacher is None:
        return state
    wanted = abstract.params[TEACHER]
    missing = sorted(set(named_leaves(wanted)) - set(named_leaves(teacher.params)))
    if missing:
        raise UserError(f"distil.teacher: {teacher.name} lacks the parameters {', '.join(missing)}")
    placed = initial_params(teacher, wanted, axes[TEACHER])
    return state._replace(params={**state.params, TEACHER: placed})


def starts_from_teacher(config: PretrainConfig, work: WorkDir) -> bool:
    """Say whether a run starts from the teacher's layers: configured so, and nothing is saved."""
    return config.distil.from_teacher and not by_first(lambda: bool(saved_steps(work.checkpoints)))


def student_start(config: PretrainConfig, teacher: SavedModel) -> SavedModel:
    """Return the student that `distil.from_teacher` names: the teacher with fewer layers.

    Raises:
        UserError: Sizes other than the number of layers differ.
    """
    student = config.model
    given = [
        f"model.{name} {getattr(student, name)!r} and {getattr(teacher.config, name)!r}"
        for name in ARCHITECTURE
        if name not in ("num_layers", "num_positions", "pooler", "pooler_activation")
        and getattr(student, name) != getattr(teacher.config, name)
    ]
    if given:
        raise UserError(
            "distil.from_teacher is true, but student and teacher differ in more than their "
            f"layers ({'; '.join(given)}); give the student the teacher's sizes, or set it to false"
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
