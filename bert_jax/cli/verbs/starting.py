"""The verbs `start` and `demo`, which make a first model."""

from pathlib import Path
from typing import Annotated, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import Directory, Given, Verb
from bert_jax.config.bounds import Above
from bert_jax.errors import UserError, signal_code


class Start(groups.Columns):
    r"""Choose a recipe for your text and time; with --go, carry it out.

    $ bert-jax start my/*.txt --hours 0.5
    $ bert-jax start my/*.txt --labels reviews.csv --hours 0.5 --go
    $ bert-jax start my/*.txt --hours 8 --topology v5e:4x4

    Looks at the text, the labels and the machine, and chooses vocabulary, size, steps and rates.
    Prints each choice with its reason, what the run should reach, and what twice the time would
    bring. Writes a recipe for `bert-jax pretrain`. The same command continues after Ctrl-C.
    """

    files: Given[tuple[Annotated[str, "FILE"], ...]]
    """Text to read: files, quoted globs or data sets, as for `bert-jax corpus --input`."""
    hours: Annotated[float, Above(0), "H"] = 1.0
    """Total time, in hours. All other choices follow from this time; the recipe shows them."""
    labels: Annotated[str, "FILE"] = ""
    """Table of texts with labels (columns text and label) for a classifier."""
    test: Annotated[str, "FILE"] = ""
    """Table of texts with labels to score the classifier on (default: a tenth of --labels)."""
    topology: Annotated[str, "NAME"] = ""
    """TPU slice to choose for instead of this machine, such as v5e:4x4 (see `bert-jax plan`)."""
    go: bool = False
    """Carry out the recipe: model, classifier, proven export and an HTML page."""
    workdir: Directory = Path("work/start")
    """Directory for the recipe and all other output."""

    def __call__(self) -> int:
        from bert_jax.cli.start.begin import Asked, begin

        if self.topology and self.go:
            raise UserError(
                "--go trains on this machine, and --topology chooses for another; leave one out, "
                "and run the recipe on the slice with launch/tpu_vm.sh"
            )
        self.only_with("--labels", self.labels, "--test", "--columns")
        names, written = self.named("text", "text_pair", "label")
        columns = tuple(sorted((names | written).items()))
        asked = Asked(self.files, self.hours, self.topology, self.labels, self.test, columns)
        promise = begin(asked, self.workdir)
        if not self.go:
            print(f"recipe      {self.workdir / 'recipe.py'}; the same command with --go runs it")
            return 0
        from bert_jax.cli.start.finish import finish

        if stopped := finish(asked, promise, self.workdir):
            print(f"stopped by {stopped}; the same command continues")
        return signal_code(stopped)


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
