"""Follow README.md from top to bottom as a newcomer does, and look at the page that comes out.

    python tests/pages/walk.py                 # make walk: 70 minutes or more on two cores

The newcomer has 3 MB of text in `my/` and 600 labelled rows in `reviews.csv`: with BERT_JAX_DATA,
an encyclopedia of 1810 and sentences of SST-2; otherwise the files of examples/files.py.
"""

import csv
import html
import lzma
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from run import CLONES, ROOT, run_page

TEXT_BYTES, ROWS = 3_000_000, 600
PAGE = "work/reviews/start.html"
NAMED = ("this model", "TF-IDF and a linear model", "a constant")
"""Scores that stand side by side in the page."""


def prepare(directory: Path) -> dict[str, Path]:
    """Write the newcomer's files; return what they are called in README.md."""
    gifts = {"my": directory / "my", "reviews.csv": directory / "reviews.csv"}
    gifts["my"].mkdir(parents=True, exist_ok=True)
    if data := os.environ.get("BERT_JAX_DATA"):
        source = Path(data, "pretrain", "encyc-britannica1810-0000.txt.xz")
        with lzma.open(source, "rb") as file:
            text = file.read(TEXT_BYTES).decode("utf-8", "ignore")
        (gifts["my"] / "text.txt").write_text(text, "utf-8")
        with Path(data, "glue", "SST-2", "train.tsv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        with gifts["reviews.csv"].open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            for row in random.Random(0).sample(rows, ROWS):
                writer.writerow((row["sentence"], row["label"]))
    else:
        made = directory / "made"
        command = [sys.executable, str(ROOT / "examples" / "files.py"), str(made)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        (made / "text.txt").replace(gifts["my"] / "text.txt")
        (made / "labels.csv").replace(gifts["reviews.csv"])
    return gifts


def lacks(page: str) -> list[str]:
    """Return the scores that the page does not name side by side, as rows of its table."""
    rows = re.findall(r"<tr><td>(.*?)<td>\w+ -?[\d.]+", page)
    return [each for each in NAMED if not any(html.unescape(row).startswith(each) for row in rows)]


def main() -> int:
    """Walk; end with 1 if a command failed, or the page lacks a score."""
    gifts = prepare(ROOT / "work" / "walk")
    problems = run_page(ROOT / "README.md", gifts, write=False)
    if not problems:
        found = lacks((CLONES / "README" / PAGE).read_text("utf-8"))
        problems = [f"{PAGE} has no score of {each}" for each in found]
    print("\n".join(problems) or f"{PAGE} names {', '.join(NAMED)}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
