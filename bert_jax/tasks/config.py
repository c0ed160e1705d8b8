"""The section `task` of a fine-tuning run, and the kinds of tasks that it can name."""

from bert_jax.tasks.kinds.choice import ChoiceConfig
from bert_jax.tasks.kinds.embedding import EmbeddingTaskConfig
from bert_jax.tasks.kinds.fields import TaskConfig
from bert_jax.tasks.kinds.glue import GlueConfig
from bert_jax.tasks.kinds.parsing import ParsingConfig
from bert_jax.tasks.kinds.squad import SquadConfig
from bert_jax.tasks.kinds.table import TableConfig
from bert_jax.tasks.kinds.tagging import TaggingConfig

TaskConfig.VARIANTS = {
    "glue": GlueConfig, "table": TableConfig, "tagging": TaggingConfig, "squad": SquadConfig,
    "choice": ChoiceConfig, "parsing": ParsingConfig, "embedding": EmbeddingTaskConfig,
}  # fmt: skip

__all__ = [
    "ChoiceConfig", "EmbeddingTaskConfig", "GlueConfig", "ParsingConfig", "SquadConfig",
    "TableConfig", "TaggingConfig", "TaskConfig",
]  # fmt: skip
