"""Reports of evaluation texts in the corpora that a model comes from."""

from pathlib import Path

from bert_jax.artefacts.saved.lineage import trace
from bert_jax.data.corpus.overlap.report import Report, reports_of
from bert_jax.data.store import is_store
from bert_jax.errors import UserError


def reports_on_ancestors(place: str | Path) -> list[Report]:
    """Return the reports on the corpora in the lineage of a directory, as far as they are here.

    Reports on another content of a corpus than the recorded one are left out. A lineage that cannot
    be read has none.
    """
    try:
        ancestors = list(trace(place).walk())
    except (UserError, OSError, RecursionError):
        return []
    found: dict[tuple[str, str], Report] = {}
    for each in ancestors:
        if each.kind != "corpus" or not each.found:
            continue
        if each.recorded and each.digest != each.recorded:
            continue
        corpus = Path(each.place)
        store = corpus / "train" if is_store(corpus / "train") else corpus
        for report in reports_of(store):
            if report.fingerprint == each.digest:
                found[report.fingerprint, report.digest] = report
    return list(found.values())
