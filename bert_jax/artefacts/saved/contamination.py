"""Reports on evaluation texts found in the corpora that a model was trained on."""

from pathlib import Path

from bert_jax.artefacts.saved.lineage import trace
from bert_jax.data.corpus.overlap.search import Report, reports_of
from bert_jax.data.store import is_store
from bert_jax.errors import UserError


def reports_on_ancestors(place: str | Path) -> list[Report]:
    """Return the reports on the corpora in a directory's lineage that are on this machine.

    Reports on a corpus whose content differs from the recorded one are left out. A lineage that
    cannot be read gives no reports.
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
