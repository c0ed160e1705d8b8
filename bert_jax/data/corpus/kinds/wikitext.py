"""Conversion of wikitext to running text, with a time limit for articles that are slow to parse."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterable

import mwparserfromhell

from bert_jax.data.corpus.documents import paragraphs
from bert_jax.tokenization.tokenizer import replace_surrogates

SECONDS = 60
"""Longest time that parsing one article may take, in seconds."""
_NO_PROSE = {"ref", "references", "table", "gallery", "math", "timeline", "score"}
_OPENERS = "[", "{", "<", "''", ";"
_MOST_STEPS = 1 << 28  # openers x characters; beyond this, a process of its own parses the article


def plain(wikitext: str, left_out: Iterable[str]) -> str | None:
    """Return the running text of an article, without tables, references, pictures and categories.

    Links to pages in the namespaces `left_out` (casefolded names) are removed with their link text.
    The result is None if parsing was stopped after `SECONDS`.
    """
    if len(wikitext) * sum(map(wikitext.count, _OPENERS)) < _MOST_STEPS:
        return _stripped(wikitext, set(left_out))
    command = [sys.executable, "-m", __name__, f"{SECONDS}"]
    given = json.dumps([wikitext, *left_out]).encode()
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
    if done.returncode == -signal.SIGALRM:
        return None
    done.check_returncode()
    return f"{json.loads(done.stdout)}"


def _stripped(wikitext: str, left_out: set[str]) -> str:
    code = mwparserfromhell.parse(wikitext)
    for link in code.filter_wikilinks():
        name, colon, _ = f"{link.title}".strip().removeprefix(":").partition(":")
        if colon and name.strip().casefold() in left_out:
            link.title, link.text = "", None  # emptied, since removing n nodes takes n * n steps
    for tag in code.filter_tags():
        if f"{tag.tag}".lower() in _NO_PROSE:
            tag.contents = ""
    return paragraphs(replace_surrogates(code.strip_code().replace("\0", " ")))


if __name__ == "__main__":
    signal.alarm(int(sys.argv[1]))  # the kernel ends the process; the parser checks no signals
    text, *names = json.loads(sys.stdin.buffer.read())
    print(json.dumps(_stripped(text, set(names))))
