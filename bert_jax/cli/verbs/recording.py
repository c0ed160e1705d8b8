"""The verb that measures recipes against each other."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from bert_jax.cli.verbs.options import Commas, Directory, File, Verb
from bert_jax.errors import UserError


class Record(Verb):
    r"""Train a recipe on a track, and add a line to the record.

    $ bert-jax record --track records/tracks/two_cores.json --input my/texts \
        --recipe records/recipes/mine/recipe.py --seeds 0,1,2 --out records/two_cores.jsonl
    $ bert-jax record --track records/tracks/two_cores.json --input my/texts \
        --recipe records/two_cores.jsonl:3

    A measurement of the speed converts the track's time to steps. If --recipe names a line of a
    record, that run is repeated with the same steps and seed, and the losses are compared exactly.
    """

    track: File
    """JSON file of the track: texts by digest, vocabulary, evaluation, devices and time."""
    input: Directory
    """Directory with the texts of the track."""
    recipe: Annotated[str, "FILE"]
    """Recipe of `bert-jax pretrain`; the first line of its docstring says what the recipe changes.
    Or a line of a record to repeat, as FILE.jsonl:LINE."""
    seeds: Commas[int] = (0,)
    """Seeds of the runs, one line for each."""
    out: File | None = None
    """File to which the lines of new runs are added (default: lines are only printed)."""
    workdir: Directory = Path("work/record")
    """Directory for corpora and runs. Finished runs are not trained again."""

    def __call__(self) -> int:
        from bert_jax.cli.record.attempt import attempt, differences, is_recorded
        from bert_jax.cli.record.track import read_track
        from bert_jax.files.checks import json_crc
        from bert_jax.infer.writers import check_out

        track = read_track(self.track)
        home = self.workdir / f"{self.track.stem}-{json_crc(asdict(track)):08x}"
        is_line = ".jsonl" in self.recipe
        self.only_with("a recipe, not with a line of a record", not is_line, "--seeds", "--out")
        if is_line:
            line = _line(self.recipe)
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home, prefix="again") as runs:
                again = line["path"], self.input, home, Path(runs), line["seed"], line["steps"]
                made = attempt(track, *again)
            for said in differences(line, made):
                print(f"differs  {said}")
            equal = made["loss"] == line["loss"]
            print(f"loss     {line['loss']} in the record, {made['loss']} here: "
                  f"{'equal' if equal else 'NOT equal'}")  # fmt: skip
            return not equal
        check_out(self.out, vectors=False, plain=True)
        for seed in self.seeds:
            made = attempt(track, self.recipe, self.input, home, home / "runs", seed)
            line = {"track": self.track.stem, "path": self.recipe, **made}
            print(text := json.dumps(line))
            if self.out and not is_recorded(line, self.out):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                with self.out.open("a") as file:
                    ended = not file.tell() or self.out.read_bytes().endswith(b"\n")
                    file.write("\n" * (not ended) + text + "\n")
        return 0


def _line(place: str) -> dict[str, Any]:
    name, _, number = place.rpartition(":")
    try:
        if (at := int(number)) < 1:
            raise IndexError(f"lines count from 1, not from {at}")
        found = json.loads(Path(name).read_text("utf-8").splitlines()[at - 1])
        return {each: found[each] for each in ("path", "seed", "steps", "loss", *found)}
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(
            f"--recipe: {place!r} names no line of a record ({error}); expected FILE:LINE, such as "
            "records/two_cores.jsonl:3"
        ) from error
