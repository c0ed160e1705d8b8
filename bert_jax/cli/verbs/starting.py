"""Verbs with which one starts."""

from pathlib import Path
from typing import Annotated, Literal

from bert_jax.cli.verbs.options import Directory, Verb


class Demo(Verb):
    """Train a small model without a download, then let it answer.

    The encoder learns from the documentation of Python and of installed packages. The translator
    learns French number words from 20,000 pairs, and translates 2,000 others, in about a minute.
    """

    recipe: Literal["modern", "bert", "translation"] | None = None
    """Kind of model. modern: rotary positions, norms before the blocks and the optimizer Muon, in
    about 3 minutes on 2 cores (default). bert: the architecture and the optimizer of 2018, in about
    6 minutes. translation: French number words to digits, and an HTML page of the attention."""
    config: Annotated[str | None, "FILE"] = None
    """Configuration file to use instead of the recipe's configuration file."""
    workdir: Directory | None = None
    """Directory to write (default: work/demo, or work/demo_translation for translation)."""

    def __call__(self) -> int:
        from bert_jax.cli.demo import masked_words, number_words

        if self.recipe == "translation":
            workdir = self.workdir or Path("work/demo_translation")
            return number_words.run_demo(self.config or number_words.CONFIG, workdir)
        recipe = masked_words.RECIPES[self.recipe or "modern"]
        if self.config:
            recipe = masked_words.RECIPES["bert"]._replace(config=self.config)
        return masked_words.run_demo(recipe, self.workdir or Path("work/demo"))
