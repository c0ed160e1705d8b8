"""Text that documents share: signatures of documents, and evaluation texts in a corpus."""
